"""Measurements: from the passes of one step to the logged numbers.

# NOTE [Monitored step]
An optimizer makes a step from one or more backward passes. Its gradient ``g`` is the sum of theirs. The rows of
all passes add up to ``g``, whatever the divisor of the loss: the number of samples, of passes, or of tokens
that count. With N rows in all, the gradient of a sample is N times its row, so that ``g`` is their mean. So
norms belong to the loss that the optimizer steps along, and packprop need not know its reduction. If samples
weigh more or less, by their tokens or by class weights, a sample's gradient carries its weight. The noise scale
and the signal-to-noise ratio are the same for every factor on the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from packprop.applications.reports.profile.layers import ROOT, owner_of
from packprop.monitor.noise import GradientNoise, gradient_noise
from packprop.monitor.passes import PassValues

TOTAL = ""
"""The name that stands for all layers."""

QUANTILES = {"5": 0.05, "25": 0.25, "median": 0.5, "75": 0.75, "95": 0.95, "max": 1.0}
"""The logged quantiles of the norms of samples' gradients."""

FENCE = 3.0
"""An outlier is this many interquartile ranges above the upper quartile: "far out" (Tukey 1977)."""

MOST_OUTLIERS = 8
"""The most outliers that are logged."""


@dataclass(frozen=True)
class LayerValues:
    """The numbers of one layer, or of all.

    Args:
        mean_square: Squared norm of the step's gradient.
        squares: Squared norms of samples' gradients ``[n]``.
        noise: Unbiased noise and signal; ``None`` for a single sample.
        trace: Trace of the GGN; ``None`` if it was not computed.
        update: Norm of the optimizer's update over that of the parameters; ``None`` if there was none.
    """

    mean_square: float
    squares: Tensor
    noise: GradientNoise | None
    trace: float | None = None
    update: float | None = None


@dataclass
class StepValues:
    """The numbers of one step.

    Args:
        samples: The number of its samples.
        layers: By name of the module that owns the parameters; ``TOTAL`` for all.
        sharpness: Curvature along the gradient; ``None`` if it was not computed.
        own: This rank's samples in each pass.
    """

    samples: int
    layers: dict[str, LayerValues]
    sharpness: float | None = None
    own: list[range] = field(default_factory=list)


def measured(
    passes: Sequence[PassValues],
    gradients: Mapping[str, Tensor],
    updates: Mapping[str, tuple[float, float]],
) -> StepValues:
    """Compute the numbers of a step; see NOTE [Monitored step].

    Args:
        passes: The results of its backward passes, one or more. Those without samples are ignored.
        gradients: By name of the parameter, the sum of their gradients ``[*p]``.
        updates: By name of the parameter, squared norms of its update and of itself; none if no optimizer has
            made a step.
    """
    own = [each.own for each in passes]
    passes = [each for each in passes if each.samples]
    if not passes:
        return StepValues(0, {}, own=own)
    samples = sum(each.samples for each in passes)
    square = {name: float(gradient.double().square().sum()) for name, gradient in gradients.items()}
    layers = {TOTAL: list(gradients)}
    for name in gradients:
        layers.setdefault(owner_of(name) or ROOT, []).append(name)
    values = {}
    for layer, parts in layers.items():
        mean_square = sum(square[name] for name in parts)
        squares = samples**2 * _joined(passes, "squares", parts)
        # products use the gradient of a sample's own pass, which is that of the step if it is the only one
        known = len(passes) == 1 and passes[0].products
        products = samples * _joined(passes, "products", parts) if known else None
        traces = float(_joined(passes, "traces", parts).sum()) if any(p.traces for p in passes) else None
        values[layer] = LayerValues(
            mean_square,
            squares,
            gradient_noise(squares, mean_square, products),
            traces,
            _update(updates[name] for name in parts if name in updates),
        )
    sharpness = next((each.sharpness for each in passes if each.sharpness is not None), None)
    return StepValues(samples, values, sharpness, own)


def _joined(passes: Sequence[PassValues], which: str, names: Sequence[str]) -> Tensor:
    """Return values of all samples, summed over parameters ``[n]``; zero if a pass does not reach one."""
    parts = []
    for each in passes:
        found: dict[str, Tensor] = getattr(each, which)
        total = torch.zeros(each.samples, dtype=torch.float64, device="cpu")
        for name in names:
            if name in found:
                total = total + found[name].double().cpu()
        parts.append(total)
    return torch.cat(parts)


def _update(squares: Any) -> float | None:
    pairs = list(squares)
    weight = sum(weight for _, weight in pairs)
    return math.sqrt(sum(update for update, _ in pairs) / weight) if weight > 0 else None


def norm_quantiles(squares: Tensor) -> dict[str, float]:
    """Return quantiles of samples' norms, by the names in ``QUANTILES``."""
    found = squares.sqrt().quantile(torch.tensor([*QUANTILES.values()], dtype=squares.dtype, device="cpu"))
    return dict(zip(QUANTILES, found.tolist(), strict=True))


def outliers(squares: Tensor) -> list[tuple[int, float]]:
    """Return samples with norms far above those of the others, the largest first: index and norm."""
    norms = squares.sqrt()
    if len(norms) < 4 or not bool(norms.isfinite().all()):
        return []
    lower, upper = norms.quantile(torch.tensor([0.25, 0.75], dtype=norms.dtype, device="cpu")).tolist()
    values, indices = norms.topk(min(MOST_OUTLIERS, len(norms)))
    pairs = zip(indices.tolist(), values.tolist(), strict=True)
    fence = upper + max(FENCE * (upper - lower), 1e-3 * upper)  # samples that are all alike differ by rounding
    return [(index, norm) for index, norm in pairs if norm > fence]
