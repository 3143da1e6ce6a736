"""Figures over the steps of a training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from packprop.applications.reports.page.figure import FIRST, Figure, chart_of, log_axis, specification
from packprop.applications.reports.profile.table import number_text

LOGARITHMIC = 20
"""An axis is logarithmic if the largest value is more than this times the smallest."""


def over_steps(lines: Sequence[Mapping[str, Any]], key: str, title: str, unit: str, text: str) -> Figure | None:
    """Draw one quantity over steps, with its interval; return ``None`` if it is never a number."""
    rows = [
        {
            "step": line["step"],
            "value": line[key],
            "low": line.get(f"{key}_low"),
            "high": line.get(f"{key}_high"),
        }
        for line in lines
        if line.get(key) is not None or line.get(f"{key}_low") is not None
    ]
    numbers = [row["value"] for row in rows if row["value"] is not None]
    if not numbers:
        return None
    low, high = min([*numbers, *(row["low"] for row in rows if row["low"])]), max(numbers)
    logarithmic = low > 0 and high > LOGARITHMIC * low
    if logarithmic:
        bottom, top = low / 1.2, high * 1.2
        scale, axis = log_axis(bottom, top)
    else:
        room = 0.05 * (high - low) or abs(high) or 1.0
        bottom, top = low - room, high + room
        scale, axis = alt.Scale(domain=[bottom, top], nice=True), alt.Axis(tickCount=5)
    base = chart_of(rows).encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(tickCount=6, grid=False), scale=alt.Scale(zero=False))
    )
    up = alt.Y("value:Q", scale=scale, axis=axis, title=unit or None)
    tooltip = [alt.Tooltip("step:Q"), alt.Tooltip("value:Q", title=title.lower(), format=".3g")]
    dots = {"size": 30, "color": FIRST, "filled": True}
    layers = [base.mark_line(color=FIRST, strokeWidth=2, point=dots).encode(y=up, tooltip=tooltip)]
    bounded = [
        {**row, "low": max(row["low"], bottom), "high": top if row["high"] is None else row["high"]}
        for row in rows
        if row["low"] is not None
    ]
    if bounded:
        band = chart_of(bounded).mark_area(color=FIRST, opacity=0.15, clip=True)
        layers.insert(0, band.encode(x="step:Q", y=alt.Y("low:Q", scale=scale), y2="high:Q"))
    return Figure(
        key,
        title,
        text,
        f"{title} in {len(numbers)} steps, from {number_text(min(numbers))} to {number_text(high)}: at first "
        f"{number_text(numbers[0])}, at last {number_text(numbers[-1])}.",
        specification(alt.layer(*layers), 220),
        ["step", title.lower(), "at least", "at most"],
        [[f"{row['step']:,}", *(number_text(row[name]) for name in ("value", "low", "high"))] for row in rows],
    )
