"""The figure of memory: the live bytes in the pass over a batch, beside plan and budget."""

from __future__ import annotations

from typing import Any

import altair as alt

from packprop.applications.reports.page.figure import FIRST, INK, MUTED, SECOND, Figure, chart_of, specification
from packprop.applications.reports.profile.costs import MemoryUse
from packprop.engine.memory import byte_text

ROOM = 1.6
"""The page names a budget of more than this times everything else, and does not draw it."""

LETTER = 0.021
"""The width of a letter of a label, as a part of the width of the figure on a phone."""


def timeline(use: MemoryUse | None) -> Figure | None:
    """Draw memory during the pass over the first batch; return ``None`` if it was not measured."""
    if use is None or not use.timeline:
        return None
    tall = max(use.peak, use.planned or 0)
    unit, size = _unit(tall)
    rows = [{"operation": at, "bytes": alive / size, "what": byte_text(alive)} for at, alive in use.timeline]
    budget = use.budget if use.budget is not None and use.budget <= ROOM * tall else None
    area = (
        chart_of(rows)
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
    drawings = [*_phases(use), area]
    for name, level, colour in (("peak by the plan", use.planned, SECOND), ("budget", budget, INK)):
        if level is not None:
            at = chart_of([{"bytes": level / size, "name": f"{name}, {byte_text(level)}"}]).encode(y="bytes:Q")
            drawings.append(at.mark_rule(color=colour, strokeDash=[6, 4], strokeWidth=1.5))
            # at the left, where the pass begins and little is alive
            named = at.mark_text(align="left", baseline="bottom", dy=-4, dx=2, color=colour)
            drawings.append(named.encode(text="name:N", x=alt.value(0)))
    return Figure(
        "memory",
        "Memory of the pass over one batch",
        "Bytes of tensors that are alive after each operation: parameters, the batch, activations, cotangents, "
        "results. The figure leaves out memory inside kernels. "
        f"{phase_words(use)} "
        + (
            ""
            if use.budget is None or budget is not None
            else f"The budget, {byte_text(use.budget)}, is far above. "
        )
        + (f"There is no plan: {use.why_not}." if use.planned is None else ""),
        f"{memory_words(use)} {phase_words(use)}".strip(),
        specification(alt.layer(*drawings), 260),
        ["operation", "alive", "part of the pass"],
        [
            [f"{at:,}", byte_text(alive), use.phase_at(at)]
            for at, alive in use.timeline[:: max(1, len(use.timeline) // 40)]
        ],
    )


def _phases(use: MemoryUse) -> list[alt.Chart]:
    """Draw a band behind every second part of the pass, and the names of all parts above, without overlap."""
    known = use.phases
    if not known and use.forward is not None:
        known = [("forward pass", 0, use.forward), ("backward pass", use.forward, use.operations)]
    rows: list[dict[str, Any]] = [
        {"first": first, "after": min(after, use.operations), "name": name}
        for name, first, after in known
        if after > first
    ]
    if not rows:
        return []
    base = chart_of(rows[::2]).encode(x="first:Q", x2="after:Q", tooltip=alt.Tooltip("name:N"))
    drawings = [base.mark_rect(color=MUTED, opacity=0.09)]
    taken = [0.0] * len(rows)
    for row in rows:
        at, wide = row["first"] / use.operations, LETTER * len(row["name"])
        at_right = at + wide > 1
        line = next((line for line, end in enumerate(taken) if end <= at), 0)
        taken[line] = at + wide
        start = chart_of([row]).encode(x="first:Q")
        drawings.append(start.mark_rule(color=MUTED, strokeWidth=0.75, opacity=0.6))
        named = start.mark_text(
            align="right" if at_right else "left", baseline="bottom", color=INK, fontSize=11, dx=1
        )
        where = alt.value("width") if at_right else alt.X("first:Q")
        drawings.append(named.encode(text="name:N", y=alt.value(-20 - 15 * line), x=where))
    return drawings


def phase_words(use: MemoryUse) -> str:
    """Return the peak of each part of the pass, in a sentence."""
    highest = [
        (name, max((size for at, size in use.timeline if first <= at < after), default=0))
        for name, first, after in use.phases
    ]
    told = ", ".join(f"{name} {byte_text(size)}" for name, size in highest if size)
    return f"Peak of each part: {told}." if told else ""


REASONS = {
    "per-sample gradients": "formed: each is the cotangent itself, or one outer product.",
    "gradients by products": "formed, as products of cotangents and inputs over a sample's positions: fewer "
    "multiplications than inner products of all pairs of positions.",
    "gradients by groups": "formed by one grouped convolution, which does not unfold the inputs.",
    "gradients in turn": "formed one after the other: all at once would take more memory than there is.",
    "cotangents and inputs alone": "not formed: inner products give the quantity directly.",
}
"""The treatment of per-sample gradients by each algorithm of a plan, and its reason."""


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
