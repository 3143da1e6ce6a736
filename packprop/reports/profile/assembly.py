"""From values of parameters to rows of the table."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from packprop.dataset.result import Result
from packprop.reports.profile.layers import Layer, Spectrum, spectrum_of
from packprop.reports.profile.result import Profile

ROOT, TOTAL = "(model)", "(total)"
"""Names of the rows of parameters that the model itself owns, and of all of them."""


def assemble(
    model: nn.Module,
    result: Result,
    tables: dict[str, dict[str, Any]],
    batches: int,
    settings: dict[str, Any],
    started: float,
) -> Profile:
    """The profile from values of parameters, over which each row sums."""
    count = result.samples
    # from the rows of a loss as reduced to samples' own losses, and from that loss to the mean one
    own = count if result.reduction == "mean" else 1
    whole = 1.0 if result.reduction == "mean" else 1 / count
    tensors: dict[str, Tensor] = {}
    factors: dict[str, dict[str, Spectrum]] = {}
    signal: dict[str, float] = {}
    noise: dict[str, float] = {}
    for name, (gradient, deviation) in tables["gradient"].items():
        tensors[f"gradient/{name}"] = gradient * whole
        tensors[f"gradient_variance/{name}"] = deviation * (own**2 / count)
        signal[name] = float((gradient.double() * whole).square().sum())
        noise[name] = float(deviation.double().sum() * (own**2 / count))
        factors[name] = {}
        for side, factor in zip("BA", tables.get("kfac", {}).get(name, []), strict=False):
            scaled = factor * whole if side == "B" else factor
            terms = count * (settings["monte_carlo_samples"] if side == "B" else 1)
            spectrum, eigenvalues = spectrum_of(scaled, terms)
            factors[name][side] = spectrum
            if eigenvalues is not None:
                tensors[f"kfac/{name}/{side}"] = scaled
                tensors[f"kfac_eigenvalues/{name}/{side}"] = eigenvalues

    def row(name: str, kind: str, parameters: dict[str, nn.Parameter]) -> Layer:
        names = [full for full in parameters if full in signal]
        entries = sum(parameter.numel() for parameter in parameters.values())
        if not names:
            return Layer(name, kind, entries)

        def over(key: str) -> Tensor:
            return sum((tables[key][full].double().cpu() for full in names), torch.zeros(()))

        norms = over("norms").sqrt() * own
        variance = sum(noise[full] for full in names)
        squared = sum(signal[full] for full in names)
        traces = {key: over(key) * own for key in ("monte_carlo", "exact") if key in tables}
        tensors[f"sample_gradient_norm/{name}"] = norms
        for each in traces.values():  # the exact one comes last
            tensors[f"sample_ggn_trace/{name}"] = each
        means = {key: float(each.mean()) for key, each in traces.items()}
        median, percentile = np.quantile(norms.numpy(), [0.5, 0.95])
        return Layer(
            name,
            kind,
            entries,
            gradient_norm=math.sqrt(squared),
            sample_gradient_norm_median=float(median),
            sample_gradient_norm_95=float(percentile),
            signal_to_noise=None if variance == 0 else squared / variance,
            ggn_trace_exact=means.get("exact"),
            ggn_trace_monte_carlo=means.get("monte_carlo"),
            factors={
                f"{full.rpartition('.')[2]}.{side}": spectrum
                for full in names
                for side, spectrum in factors[full].items()
            },
        )

    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in trainable))
    layers = [
        row(
            owner or ROOT,
            type(model.get_submodule(owner)).__name__,
            {name: p for name, p in trainable.items() if name.rpartition(".")[0] == owner},
        )
        for owner in owners
    ]
    # a layer's factors say nothing of the whole
    total = dataclasses.replace(row(TOTAL, type(model).__name__, trainable), factors={})
    return Profile(
        layers,
        total,
        loss=result.loss * whole,
        samples=count,
        batches=batches,
        settings=settings,
        seconds=time.perf_counter() - started,
        tensors={name: tensor.cpu() for name, tensor in tensors.items()},
    )
