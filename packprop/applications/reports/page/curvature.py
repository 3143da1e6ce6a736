"""Figures of curvature: traces of the GGN along depth, spectra of Kronecker factors."""

from __future__ import annotations

import math
from typing import Any

import altair as alt
import torch

from packprop.applications.reports.page.figure import (
    FIRST,
    SECOND,
    STEP,
    Figure,
    chart_of_layers,
    largest_layers,
    log_axis,
    of_how_many,
    specification,
)
from packprop.applications.reports.page.findings import trace_of
from packprop.applications.reports.profile.layers import Layer, factor_key
from packprop.applications.reports.profile.table import number_text
from packprop.applications.reports.profile.values import ProfileValues

SIDES = {"A": "A, of inputs", "B": "B, of output gradients"}
"""The two Kronecker factors."""

MOST_EIGENVALUES = 48
"""The most eigenvalues of a factor in the figure: the largest, the smallest, and others at even steps."""


def traces(values: ProfileValues) -> Figure | None:
    """Draw traces of the GGN along depth; return ``None`` if there is no curvature."""
    found = {layer.name: trace_of(layer) for layer in values.layers}
    sizes = {name: trace for name, trace in found.items() if trace is not None and math.isfinite(trace)}
    layers = largest_layers(values.layers, sizes)
    total = sum(sizes.values())
    if not layers or total <= 0:
        return None
    rows = [
        {
            "layer": layer.name,
            "trace": sizes[layer.name],
            "drawn": layer.ggn_trace_monte_carlo,
            "share": sizes[layer.name] / total,
        }
        for layer in layers
    ]
    base = chart_of_layers(rows).encode(
        tooltip=[
            alt.Tooltip("layer:N"),
            alt.Tooltip("trace:Q", format=".3g"),
            alt.Tooltip("drawn:Q", title="Monte Carlo", format=".3g"),
            alt.Tooltip("share:Q", title="share of all layers", format=".1%"),
        ],
    )
    drawings: list[alt.Chart] = [
        base.mark_bar(color=FIRST, height=alt.RelativeBandSize(0.6)).encode(
            x=alt.X("trace:Q", title="trace of the GGN", axis=alt.Axis(tickCount=5))
        )
    ]
    exact = any(layer.ggn_trace_exact is not None for layer in layers)
    if exact:
        drawings.append(base.mark_tick(color=SECOND, thickness=2.5, size=16).encode(x="drawn:Q"))
    top = max(layers, key=lambda layer: sizes[layer.name])
    how = "exact; the mark is the Monte Carlo estimate" if exact else "a Monte Carlo estimate"
    return Figure(
        "curvature",
        "Curvature along depth",
        "Trace of each layer's block of the generalized Gauss-Newton matrix, from the first layer to the last, "
        f"{how}.{of_how_many(len(layers), len(sizes))}",
        f"Traces of {len(layers)} layers; the largest, {number_text(sizes[top.name])}, is that of {top.name}, "
        f"{sizes[top.name] / total:.0%} of all.",
        specification(alt.layer(*drawings), STEP * len(layers)),
        ["layer", "trace", "Monte Carlo", "share of all", "trace for each parameter"],
        [
            [
                layer.name,
                number_text(sizes[layer.name]),
                number_text(layer.ggn_trace_monte_carlo),
                f"{sizes[layer.name] / total:.1%}",
                number_text(sizes[layer.name] / layer.parameters),
            ]
            for layer in layers
        ],
    )


def spectra(values: ProfileValues) -> Figure | None:
    """Draw eigenvalues of the Kronecker factors of each layer; return ``None`` if there are none."""
    layers = largest_layers(
        values.layers,
        {
            layer.name: float(layer.parameters)
            for layer in values.layers
            if any(spectrum.rank for spectrum in layer.factors.values())
        },
    )
    if not layers:
        return None
    rows: list[dict[str, Any]] = []
    cells: list[list[str]] = []
    full = 0
    for layer in layers:
        for side, name, eigenvalues in _factors_of(values, layer):
            spectrum = layer.factors[name]
            full += spectrum.rank == spectrum.size
            cells.append(
                [
                    layer.name,
                    name,
                    f"{spectrum.rank} of {spectrum.size}",
                    number_text(spectrum.largest),
                    number_text(spectrum.smallest),
                    number_text(spectrum.condition),
                ]
            )
            rows += [{"layer": layer.name, "side": SIDES[side], "value": value} for value in eigenvalues]
    if not rows:
        return None
    scale, axis = log_axis(min(row["value"] for row in rows), 1.0)
    sides = [*SIDES.values()]
    chart = (
        chart_of_layers(rows)
        .mark_tick(thickness=1.2, size=9, opacity=0.75)
        .encode(
            yOffset=alt.YOffset("side:N", sort=sides),
            x=alt.X("value:Q", scale=scale, title="eigenvalue / largest (logarithmic)", axis=axis),
            color=alt.Color("side:N", scale=alt.Scale(domain=sides, range=[SECOND, FIRST]), sort=sides),
            tooltip=[
                alt.Tooltip("layer:N"),
                alt.Tooltip("side:N", title="factor"),
                alt.Tooltip("value:Q", title="eigenvalue / largest", format=".2g"),
            ],
        )
    )
    return Figure(
        "spectra",
        "Spectra of the Kronecker factors",
        "Each mark is an eigenvalue of a factor, relative to the largest one, down to rounding error. Factors "
        "seldom have full rank: inverses need damping. The wider a row is spread, the less one step size suits "
        "all its directions.",
        f"Eigenvalues of {len(cells)} Kronecker factors in {len(layers)} layers; {full} of the factors have "
        "full rank.",
        specification(chart, STEP * len(layers)),
        ["layer", "factor", "rank", "largest", "smallest above rounding", "condition"],
        cells,
    )


def _factors_of(values: ProfileValues, layer: Layer) -> list[tuple[str, str, list[float]]]:
    """Return side, name and relative eigenvalues of the layer's first factor of each side."""
    found: dict[str, tuple[str, str, list[float]]] = {}
    for name, spectrum in layer.factors.items():
        side = name.rpartition(".")[2]
        eigenvalues = values.tensors.get(f"kfac_eigenvalues/{factor_key(layer, name)}")
        if side in found or eigenvalues is None or not spectrum.rank or not spectrum.largest:
            continue
        kept = (eigenvalues[-spectrum.rank :] / spectrum.largest).clamp(max=1)
        if len(kept) > MOST_EIGENVALUES:
            kept = kept[torch.linspace(0, len(kept) - 1, MOST_EIGENVALUES, device="cpu").round().long()]
        found[side] = (side, name, [float(f"{value:.4g}") for value in kept.tolist()])
    return [found[side] for side in SIDES if side in found]
