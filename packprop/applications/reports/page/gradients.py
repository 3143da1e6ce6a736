"""Figures of gradients: signal and noise by layer, norms of single samples."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
from torch import Tensor

from packprop.applications.reports.page.figure import (
    FIRST,
    INK,
    MUTED,
    SECOND,
    STEP,
    Figure,
    chart_of,
    chart_of_layers,
    largest_layers,
    log_axis,
    of_how_many,
    specification,
)
from packprop.applications.reports.profile.table import number_text
from packprop.applications.reports.profile.uncertainty import (
    interval_text,
    rounded_text,
    signal_to_noise_interval,
)
from packprop.applications.reports.profile.values import ProfileValues

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""The quantiles of norms in the figure."""

BINS = 40
"""The number of bins in the histogram of norms."""


def signal_to_noise(values: ProfileValues) -> Figure | None:
    """Draw signal to noise by layer; return ``None`` if no layer has it."""
    sizes = {
        layer.name: layer.signal_to_noise
        for layer in values.layers
        if layer.signal_to_noise is not None and layer.signal_to_noise > 0
    }
    layers = largest_layers(values.layers, sizes)
    if not layers:
        return None
    floor = 1 / values.samples
    lowest = min([*sizes.values(), floor]) / 1.5
    rows: list[dict[str, Any]] = []
    for layer in layers:
        ratio = sizes[layer.name]
        low, high = signal_to_noise_interval(layer, values.norms_of(layer)) or (ratio, ratio)
        rows.append(
            {
                "layer": layer.name,
                "ratio": ratio,
                "low": max(lowest, low),
                "high": high,
                "between": interval_text(low, high),
                "said": rounded_text(ratio, high - ratio),
                "batch": rounded_text(1 / ratio, (high - ratio) / ratio**2),
            }
        )
    scale, axis = log_axis(lowest, max([floor, *(row["high"] for row in rows)]) * 1.2)
    base = chart_of_layers(rows)
    tooltip = [
        alt.Tooltip("layer:N"),
        alt.Tooltip("said:N", title="signal to noise"),
        alt.Tooltip("between:N", title="range"),
        alt.Tooltip("batch:N", title="noise equals signal at a batch of"),
    ]
    chart = alt.layer(
        chart_of([{"floor": floor}]).mark_rule(color=MUTED, strokeDash=[4, 4]).encode(x="floor:Q"),
        base.mark_rule(color=FIRST, strokeWidth=3, opacity=0.35).encode(x="low:Q", x2="high:Q"),
        base.mark_circle(color=FIRST, size=90, opacity=1).encode(
            x=alt.X("ratio:Q", scale=scale, title="signal to noise (logarithmic)", axis=axis), tooltip=tooltip
        ),
    )
    weakest, strongest = (pick(rows, key=lambda row: row["ratio"]) for pick in (min, max))
    return Figure(
        "signal",
        "Signal and noise, layer by layer",
        "Squared norm of the mean gradient over the summed variance of the samples' gradients. The further "
        "right a dot is, the more the samples agree. A bar shows the uncertainty, at most two standard errors "
        f"to either side. Left of the dashed line, 1/{values.samples:,}, a value may be zero."
        f"{of_how_many(len(layers), len(sizes))}",
        f"Signal to noise of {len(layers)} layers: {weakest['said']} in {weakest['layer']} to "
        f"{strongest['said']} in {strongest['layer']}; one over the number of samples is "
        f"{number_text(floor)}.",
        specification(chart, STEP * len(layers)),
        ["layer", "signal to noise", "range", "noise equals signal at a batch of"],
        [[row["layer"], row["said"], row["between"], row["batch"]] for row in rows],
    )


def norm_histogram(values: ProfileValues) -> Figure | None:
    """Draw the distribution of per-sample norms, in all parameters together; ``None`` if all are equal."""
    norms = _finite(values.norms_of(values.total))
    positive = norms[norms > 0]
    if len(positive) < 2 or positive[0] == positive[-1]:
        return None
    edges = np.geomspace(positive[0], positive[-1], BINS + 1)
    counts, _ = np.histogram(positive, edges)
    rows = [
        {"from": float(left), "to": float(right), "samples": int(count)}
        for left, right, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    scale, axis = log_axis(float(positive[0]), float(positive[-1]))
    bars = (
        chart_of(rows)
        .mark_rect(color=FIRST, opacity=0.85)
        .encode(
            x=alt.X("from:Q", scale=scale, title="norm of a sample's gradient (logarithmic)", axis=axis),
            x2="to:Q",
            y=alt.Y("samples:Q", title="samples", axis=alt.Axis(tickCount=4)),
            y2=alt.Y2Datum(0),
            tooltip=[
                alt.Tooltip("samples:Q"),
                alt.Tooltip("from:Q", format=".3g"),
                alt.Tooltip("to:Q", format=".3g"),
            ],
        )
    )
    layers = [bars]
    if values.outlying:
        marks = [{"from": each.norm, "place": each.place} for each in values.outlying if each.norm > 0]
        rug = chart_of(marks).mark_tick(color=SECOND, thickness=2, size=14, orient="vertical", yOffset=-8)
        tooltip = [alt.Tooltip("place:Q", title="sample"), alt.Tooltip("from:Q", title="norm", format=".4g")]
        layers.append(rug.encode(x="from:Q", y=alt.YDatum(0), tooltip=tooltip))
    median, high = np.quantile(norms, [0.5, 0.95])
    zeros = int((norms <= 0).sum())
    without = f" The figure leaves out {zeros} samples with a gradient of zero." if zeros else ""
    return Figure(
        "norms",
        "Norms of per-sample gradients",
        "The number of samples by the norm of their gradient, all parameters together. Marks at the foot show "
        f"the samples below.{without}",
        f"Histogram of {len(positive):,} norms from {number_text(float(positive[0]))} to "
        f"{number_text(float(positive[-1]))}, with a median of {number_text(float(median))} and a 95th "
        f"percentile of {number_text(float(high))}.",
        specification(alt.layer(*layers), 200),
        ["norm from", "to", "samples"],
        [[number_text(row["from"]), number_text(row["to"]), f"{row['samples']:,}"] for row in rows],
    )


def norms_by_layer(values: ProfileValues) -> Figure | None:
    """Draw quantiles of the norms in each layer; return ``None`` if no layer has norms."""
    norms = {
        layer.name: found
        for layer in values.layers
        if len(found := _finite(values.norms_of(layer))) and found[-1] > 0
    }
    layers = largest_layers(values.layers, {name: float(found[-1]) for name, found in norms.items()})
    if not layers:
        return None
    rows: list[dict[str, Any]] = []
    cells: list[list[str]] = []
    for layer in layers:
        quantiles = [float(level) for level in np.quantile(norms[layer.name], LEVELS)]
        cells.append([layer.name, *map(number_text, quantiles), number_text(layer.gradient_norm)])
        names = ("low", "left", "median", "right", "high", "most")
        # a logarithmic axis has no place for zero
        drawn = {name: value if value > 0 else None for name, value in zip(names, quantiles, strict=True)}
        rows.append({"layer": layer.name, "mean": layer.gradient_norm or None, **drawn})
    seen = [row[name] for row in rows for name in ("low", "left", "most", "mean") if row[name] is not None]
    scale, axis = log_axis(min(seen) / 1.2, max(seen) * 1.2)
    titles = {"low": "5%", "median": "median", "high": "95%", "most": "largest", "mean": "mean gradient"}
    base = chart_of_layers(rows).encode(
        tooltip=[
            alt.Tooltip("layer:N"),
            *(alt.Tooltip(f"{name}:Q", title=title, format=".3g") for name, title in titles.items()),
        ]
    )
    chart = alt.layer(
        base.mark_rule(color=FIRST, strokeWidth=1.5).encode(
            x=alt.X("low:Q", scale=scale, title="norm (logarithmic)", axis=axis), x2="high:Q"
        ),
        base.mark_rule(color=FIRST, strokeWidth=8, opacity=0.5).encode(x="left:Q", x2="right:Q"),
        base.mark_tick(color=FIRST, thickness=2, size=12).encode(x="median:Q"),
        base.mark_point(color=INK, shape="diamond", filled=False, size=40, opacity=0.8).encode(x="most:Q"),
        base.mark_circle(color=SECOND, size=60, opacity=1).encode(x="mean:Q"),
    )
    widest = max(layers, key=lambda layer: float(norms[layer.name][-1]))
    return Figure(
        "norms-by-layer",
        "The same in each layer",
        "Thick: the middle half of the samples, with the median; thin: 5 to 95 percent; diamond: the largest; "
        f"dot: norm of the mean gradient, in which samples cancel.{of_how_many(len(layers), len(norms))}",
        f"Quantiles of gradient norms in {len(layers)} layers; the largest single norm, "
        f"{number_text(float(norms[widest.name][-1]))}, is in {widest.name}.",
        specification(chart, STEP * len(layers)),
        ["layer", "5%", "25%", "median", "75%", "95%", "largest", "mean gradient"],
        cells,
    )


def _finite(norms: Tensor | None) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return finite norms in ascending order."""
    if norms is None:
        return np.zeros(0)
    found = norms.double().numpy()
    return np.sort(found[np.isfinite(found)])
