"""The figure of memory: the live bytes in the pass over a batch, beside plan and budget."""

from __future__ import annotations

import altair as alt

from packprop.memory.bytes import byte_text
from packprop.reports.page.figure import FIRST, INK, MUTED, SECOND, Figure, data_of, specification
from packprop.reports.profile.memory_use import MemoryUse

ROOM = 1.6
"""A budget of more than so many times everything else is named, and not drawn."""


def timeline(use: MemoryUse | None) -> Figure | None:
    """Draw memory during the pass over the first batch; return ``None`` if it was not measured."""
    if use is None or not use.timeline:
        return None
    unit, size = _unit(max(use.peak, use.planned or 0))
    rows = [{"operation": at, "bytes": alive / size, "what": byte_text(alive)} for at, alive in use.timeline]
    tall = max(use.peak, use.planned or 0)
    lines = [("peak by the plan", use.planned, SECOND)]
    drawn_budget = use.budget is not None and use.budget <= ROOM * tall
    if drawn_budget:
        lines.append(("budget", use.budget, INK))
    levels = [
        {"bytes": level / size, "name": f"{name}, {byte_text(level)}", "colour": colour}
        for name, level, colour in lines
        if level is not None
    ]
    area = (
        alt.Chart(data_of(rows))
        .mark_area(
            color=FIRST, opacity=0.25, line={"color": FIRST, "strokeWidth": 1.5}, interpolate="step-after"
        )
        .encode(
            x=alt.X(
                "operation:Q",
                title="operation of the pass",
                scale=alt.Scale(domain=[0, use.operations], nice=False),
                axis=alt.Axis(tickCount=5, format=",d"),
            ),
            y=alt.Y("bytes:Q", title=unit, axis=alt.Axis(tickCount=5)),
            tooltip=[alt.Tooltip("operation:Q", format=",d"), alt.Tooltip("what:N", title="alive")],
        )
    )
    drawings = [area]
    for level in levels:
        at = alt.Chart(data_of([level])).encode(y="bytes:Q")
        drawings.append(at.mark_rule(color=str(level["colour"]), strokeDash=[6, 4], strokeWidth=1.5))
        drawings.append(
            at.mark_text(align="right", baseline="bottom", dy=-4, color=str(level["colour"])).encode(
                text="name:N", x=alt.value("width")
            )
        )
    if use.forward is not None:
        end = alt.Chart(data_of([{"operation": use.forward, "name": "backward pass"}])).encode(x="operation:Q")
        drawings.append(end.mark_rule(color=MUTED, strokeWidth=1))
        drawings.append(
            end.mark_text(align="left", baseline="top", dx=5, color=MUTED).encode(
                text="name:N", y=alt.value(26)
            )
        )
    return Figure(
        "memory",
        "Memory of the pass over one batch",
        "Bytes of tensors that are alive after each operation: parameters, the batch, activations, cotangents, "
        "results. The figure does not see memory inside a kernel. "
        + ("" if use.budget is None or drawn_budget else f"The budget, {byte_text(use.budget)}, is far above. ")
        + (f"There is no plan: {use.why_not}." if use.planned is None else ""),
        memory_words(use),
        specification(alt.layer(*drawings).properties(height=260)),
        ["operation", "alive"],
        [[f"{at:,}", byte_text(alive)] for at, alive in use.timeline[:: max(1, len(use.timeline) // 40)]],
    )


REASONS = {
    "per-sample gradients": "formed: each is there with the cotangent, or is one outer product.",
    "gradients by products": "formed, as products of cotangents and inputs over a sample's positions: fewer "
    "multiplications than to compare all pairs of positions.",
    "gradients by groups": "formed by one grouped convolution, which does not unfold the inputs.",
    "gradients in turn": "formed one after the other: all at once would take more memory than there is.",
    "cotangents and inputs alone": "not formed: inner products give the quantity directly.",
}
"""The treatment of per-sample gradients by each algorithm of a plan, and its reason."""


def reasons_of(use: MemoryUse | None) -> dict[str, str]:
    """Return the algorithms that the plan chose, and why."""
    chosen = {} if use is None else dict.fromkeys(choice["algorithm"] for choice in use.choices)
    return {algorithm: REASONS[algorithm] for algorithm in chosen}


def memory_words(use: MemoryUse) -> str:
    """Return peak, plan and budget in a sentence."""
    words = f"A batch of {use.samples:,} samples took {byte_text(use.peak)} at its peak"
    if use.planned is not None:
        words += f"; {byte_text(use.planned)} were planned"
    return f"{words}, within a budget of {byte_text(use.budget)}." if use.budget is not None else f"{words}."


def _unit(most: int) -> tuple[str, int]:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if most >= size:
            return unit, size
    return "bytes", 1
