"""From a profile to its page."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from packprop.applications.reports.page.findings import (
    findings_of,
    scale_interval,
    scale_text,
    trace_of,
)
from packprop.applications.reports.page.libraries import ENGINE, require_libraries
from packprop.applications.reports.page.naming import folded_names
from packprop.applications.reports.page.templating import template
from packprop.applications.reports.profile.costs import Cost, MemoryUse
from packprop.applications.reports.profile.layers import TOTAL, Layer
from packprop.applications.reports.profile.table import counted, number_text
from packprop.applications.reports.profile.uncertainty import range_text, rounded_text, signal_to_noise_interval
from packprop.applications.reports.profile.values import ProfileValues
from packprop.engine.memory import byte_text

MADE = ("date", "command", "factory", "commit")
"""The settings that a page shows as its origin, if they are known."""

Cell = tuple[str, float | str | None]
"""The text of a cell in the table of layers, and its value for sorting."""

COLUMNS = (
    ("layer", "name of the module, in the order in which the model has them"),
    ("kind", "class of the module"),
    ("parameters", "number of trainable parameters"),
    ("gradient norm", "of the mean loss"),
    ("sample median", "median of the norms of single samples' gradients"),
    ("sample 95%", "their 95th percentile"),
    ("signal to noise", "squared gradient norm over the trace of the samples' covariance"),
    ("GGN trace", "the exact trace if it was computed, else the Monte Carlo estimate"),
    (
        "condition A",
        "of the Kronecker factor of the inputs: largest over smallest eigenvalue above rounding error; with "
        "rank/size if some are below it",
    ),
    ("condition B", "of the Kronecker factor of output gradients"),
)
"""Titles of the table of layers, and their meaning."""


def page_of(values: ProfileValues) -> str:
    """Return the page of a profile, as text.

    Raises:
        PackpropError: If the libraries that draw it are not installed.
    """
    require_libraries()
    from packprop.applications.reports.page import curvature, gradients, memory

    figures = {
        "signal": gradients.signal_to_noise(values),
        "norms": gradients.norm_histogram(values),
        "by_layer": gradients.norms_by_layer(values),
        "curvature": curvature.traces(values),
        "spectra": curvature.spectra(values),
        "memory": memory.timeline(values.memory),
    }
    costs = costs_table(values.memory)
    return template("page.html").render(
        **shared_parts(values),
        figures=figures,
        shown=["costs", *(figure.key for figure in figures.values() if figure is not None)],
        costs=costs,
        **samples_of(values),
        reasons=memory.REASONS,
    )


def fragment_of(values: ProfileValues) -> str:
    """Return a piece of HTML that a notebook shows: findings and the table of layers, without scripts.

    Raises:
        PackpropError: If the template engine is not installed.
    """
    require_libraries(ENGINE)
    return template("fragment.html").render(**shared_parts(values))


def shared_parts(values: ProfileValues) -> dict[str, Any]:
    """Return the values of templates that the page and its short form in a notebook share."""
    between = scale_interval(values)
    key_numbers = [
        ("loss", number_text(values.loss)),
        ("samples", f"{values.samples:,}"),
        ("parameters", f"{values.total.parameters:,}"),
        ("gradient norm", number_text(values.total.gradient_norm)),
        ("noise scale", scale_text(values)),
        *([("noise scale, range", range_text(*between))] if between else []),
    ]
    if values.memory is not None:
        key_numbers.append(("peak memory", byte_text(values.memory.peak)))
    settings = values.settings
    folded = folded_names([layer.name for layer in values.layers]) | {values.total.name: values.total.name}
    return {
        "values": values,
        "title": f"{settings['model']} on {counted(values.samples, 'sample')}",
        "facts": "{loss}, {mode} mode, {precision} on {device}".format_map(settings),
        "made": [(name, settings[name]) for name in MADE if settings.get(name)],
        "findings": findings_of(values),
        "key_numbers": key_numbers,
        "columns": COLUMNS,
        "rows": [_cells(layer, folded, values.norms_of(layer)) for layer in values.layers],
        "total": _cells(values.total, folded, values.norms_of(values.total)),
    }


def costs_table(use: MemoryUse | None) -> dict[str, Any] | None:
    """Return titles of quantities, rows of layers, the total and the longest time; ``None`` for no costs."""
    if use is None or not use.costs:
        return None
    quantities = [*dict.fromkeys(cost.quantity for cost in use.costs)]
    cells = {(cost.layer, cost.quantity): cost for cost in use.costs}
    # in the order of the forward pass; the backward pass meets them in reverse
    layers = [*dict.fromkeys(cost.layer for cost in use.costs if cost.layer != TOTAL)][::-1]
    folded = folded_names(layers)

    def cells_of(layer: str) -> list[Cost | None]:
        return [cells.get((layer, quantity)) for quantity in quantities]

    return {
        "quantities": quantities,
        "rows": [(folded[layer], layer, cells_of(layer)) for layer in layers],
        "total": cells_of(TOTAL),
        "longest": max((cost.seconds for cost in use.costs if cost.layer != TOTAL), default=0.0),
    }


def samples_of(values: ProfileValues) -> dict[str, Any]:
    """Return the outlying samples, with pictures as URLs and losses of tokens; and the largest such loss."""
    norms = values.norms_of(values.total)
    median = 0.0 if norms is None else float(norms.median())
    most = max((loss or 0.0 for each in values.outlying for loss in each.token_losses or []), default=0.0)
    samples = [
        {
            "sample": each,
            "picture": None if each.picture is None else picture_url(values.tensors[each.picture]),
            "times": each.norm / median if median else None,
            "tokens": [*zip(each.pieces or [], each.token_losses or [], strict=False)] if most > 0 else [],
        }
        for each in values.outlying
    ]
    return {"samples": samples, "largest_loss": most}


def picture_url(picture: Tensor) -> str:
    """Return an image as a URL that holds it; bytes ``[height, width]`` or ``[height, width, 3]``."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(picture.numpy()).save(out, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def _cells(layer: Layer, folded: Mapping[str, str], norms: Tensor | None) -> list[Cell]:
    numbers = [layer.gradient_norm, layer.sample_gradient_norm_median, layer.sample_gradient_norm_95]
    ratio, interval = layer.signal_to_noise, signal_to_noise_interval(layer, norms)
    error = None if interval is None or ratio is None else interval[1] - ratio
    return [
        (folded[layer.name], layer.name),
        (layer.kind, layer.kind),
        (f"{layer.parameters:,}", layer.parameters),
        *((number_text(number), number) for number in numbers),
        (number_text(None) if ratio is None else rounded_text(ratio, error), ratio),
        (number_text(trace_of(layer)), trace_of(layer)),
        *(_condition(layer, side) for side in "AB"),
    ]


def _condition(layer: Layer, side: str) -> Cell:
    """Return the condition of the layer's first factor of this side, with its rank if that is not full."""
    spectrum = layer.factor(side)
    if spectrum is None or spectrum.rank is None:
        wide = "-" if spectrum is None or spectrum.built else f"{spectrum.size} wide"
        return wide, None
    rank = "" if spectrum.rank == spectrum.size else f" ({spectrum.rank}/{spectrum.size})"
    return f"{number_text(spectrum.condition)}{rank}", spectrum.condition
