"""A figure: a drawing, words that describe it, and the table behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from packprop.applications.reports.page.naming import short_labels
from packprop.applications.reports.profile.layers import Layer

INK, MUTED, LINE, FIRST, SECOND = (f"var(--{name})" for name in ("ink", "muted", "line", "first", "second"))
"""Colours, which the style sheet of the page defines, once for light and once for dark."""

MOST_LAYERS = 60
"""The number of layers that a figure has room for."""

STEP = 22
"""Height of a layer in a figure, in pixels."""


@dataclass(frozen=True)
class Figure:
    """A figure of the page.

    Args:
        key: Its name in the page.
        title: Its heading.
        text: An explanation of how to read it.
        alternative: Its contents in words, for readers who do not see it.
        drawing: Its Vega-Lite specification.
        columns: Titles of the table behind it.
        rows: Cells of that table.
    """

    key: str
    title: str
    text: str
    alternative: str
    drawing: dict[str, Any]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def chart_of(rows: Sequence[Mapping[str, Any]]) -> alt.Chart:
    """Return a chart of rows, without marks."""
    return alt.Chart(alt.InlineData(values=[dict(row) for row in rows]))


def chart_of_layers(rows: Sequence[Mapping[str, Any]]) -> alt.Chart:
    """Return a chart of rows, without marks, each at the height of its ``"layer"``; layers keep their order."""
    labels = short_labels([*dict.fromkeys(row["layer"] for row in rows)])
    axis = alt.Axis(grid=False, labelColor=INK, minExtent=60)
    return chart_of([{"label": labels[row["layer"]], **row} for row in rows]).encode(
        y=alt.Y("label:N", sort=[*labels.values()], title=None, axis=axis)
    )


def specification(chart: Any, height: int) -> dict[str, Any]:
    """Return the Vega-Lite specification of a chart that fills the width of the page, in the page's colours."""
    plain = chart.configure(
        background="transparent",
        font="system-ui, sans-serif",
        view=alt.ViewConfig(stroke=None),
        axis=alt.AxisConfig(
            labelColor=MUTED,
            titleColor=MUTED,
            gridColor=LINE,
            domain=False,
            ticks=False,
            labelFontSize=12,
            titleFontSize=12,
            titleFontWeight="normal",
            titlePadding=10,
            labelPadding=6,
            labelLimit=200,
        ),
        legend=alt.LegendConfig(
            labelColor=INK,
            titleColor=MUTED,
            labelFontSize=12,
            orient="top",
            direction="horizontal",
            title=None,
            symbolStrokeWidth=2,
            offset=6,
            labelLimit=320,
            columns=2,
        ),
        bar=alt.BarConfig(color=FIRST),
        text=alt.MarkConfig(color=MUTED, fontSize=12),
    ).properties(
        width="container", height=height, autosize=alt.AutoSizeParams(type="fit-x", contains="padding")
    )
    drawn: dict[str, Any] = plain.to_dict()
    return drawn


def log_axis(low: float, high: float) -> tuple[alt.Scale, alt.Axis]:
    """Return a logarithmic scale from ``low`` to ``high``, and its axis: powers of ten, with ticks between."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = math.log10(high / low)
    steps = (1, 1.5, 2, 3, 4, 5, 7) if decades < 1 else (1, 2, 5) if decades < 2.2 else (1,)
    apart = max(1, round((last - first) / 8))
    ticks = [times * 10.0**power for power in range(first, last + 1, apart) for times in steps]
    ticks = [float(f"{tick:.6g}") for tick in ticks if low <= tick <= high]
    # d3's ~g: without trailing zeros, and with an exponent where that is shorter
    shape = "~g" if ticks and ticks[0] >= 1e-4 and ticks[-1] < 1e6 else ".0e"
    axis = alt.Axis(values=ticks, format=shape, labelOverlap="greedy", labelSeparation=6)  # for narrow windows
    return alt.Scale(type="log", domain=[low, high], nice=False), axis


def largest(names: Sequence[str], sizes: Mapping[str, float]) -> list[str]:
    """Return the layers that have a number, in their order; if there are too many, the largest of them."""
    known = [name for name in names if name in sizes]
    kept = set(sorted(known, key=lambda name: -sizes[name])[:MOST_LAYERS])
    return [name for name in known if name in kept]


def largest_layers(layers: Sequence[Layer], sizes: Mapping[str, float]) -> list[Layer]:
    """Apply ``largest`` to rows of a profile."""
    names = {*largest([layer.name for layer in layers], sizes)}
    return [layer for layer in layers if layer.name in names]


def of_how_many(shown: int, known: int) -> str:
    """Tell how many of the layers a figure shows; return an empty text if it shows all."""
    return "" if shown == known else f" Of {known} layers, the {shown} with the largest values are shown."
