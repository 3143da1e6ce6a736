"""The rows of a profile, from the values of parameters."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from packprop.applications.dataset.result import Result
from packprop.applications.reports.profile.layers import ROOT, TOTAL, Layer, Spectrum, owner_of, spectrum_of
from packprop.applications.reports.profile.result import Profile
from packprop.engine.tensors import class_before_sharding, named_modules, named_parameters

Tables = dict[str, dict[str, Any]]
"""Short name of an extension -> parameter name -> value."""


def assemble(
    model: nn.Module,
    result: Result,
    tables: Tables,
    batches: int,
    settings: dict[str, Any],
    started: float,
) -> Profile:
    """Make the profile: each row takes the values of its parameters together."""
    mean = result.reduction == "mean"
    measurements = Measurements(
        tables,
        result.samples,
        sample_scale=result.samples if mean else 1,
        mean_scale=1.0 if mean else 1 / result.samples,
    )
    parameters = {
        name: measurements.of_parameter(name, settings["monte_carlo_samples"]) for name in tables["gradient"]
    }
    tensors = {key: tensor for values in parameters.values() for key, tensor in values.tensors.items()}

    def row(name: str, kind: str, owned: dict[str, nn.Parameter]) -> Layer:
        reached = {full: parameters[full] for full in owned if full in parameters}
        layer = Layer(name, kind, sum(parameter.numel() for parameter in owned.values()))
        if not reached:
            return layer
        norms, traces = measurements.of_samples(list(reached))
        tensors[f"sample_gradient_norm/{name}"] = norms
        for trace in traces.values():  # the exact one comes last and replaces the estimate
            tensors[f"sample_ggn_trace/{name}"] = trace
        return _measured(layer, reached, norms, traces)

    trainable = {name: p for name, p in named_parameters(model) if p.requires_grad}
    layers, modules = [], dict(named_modules(model))
    for owner in dict.fromkeys(owner_of(name) for name in trainable):
        owned = {name: p for name, p in trainable.items() if owner_of(name) == owner}
        layers.append(row(owner or ROOT, class_before_sharding(modules[owner]).__name__, owned))
    # the factors of single layers say nothing about the whole model
    total = dataclasses.replace(row(TOTAL, class_before_sharding(modules[""]).__name__, trainable), factors={})
    return Profile(
        layers,
        total,
        loss=result.loss * measurements.mean_scale,
        samples=result.samples,
        batches=batches,
        settings=settings,
        seconds=time.perf_counter() - started,
        tensors={name: tensor.cpu() for name, tensor in tensors.items()},
    )


@dataclass(frozen=True)
class ParameterValues:
    """The contribution of one parameter to the row of its layer.

    Args:
        signal: Squared norm of the mean loss's gradient.
        noise: Trace of the covariance of the samples' gradients.
        factors: Spectra of its Kronecker factors by side, ``"A"`` and ``"B"``.
        tensors: Its saved tensors, by the names of ``Profile.tensors``.
    """

    signal: float
    noise: float
    factors: dict[str, Spectrum]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Measurements:
    """Values over a data set, and the scales to the losses of a profile.

    Args:
        tables: The values, of the loss as it reduces.
        samples: The number of samples.
        sample_scale: The factor from a sample's share of the reduced loss to its own loss.
        mean_scale: The factor from the reduced loss to the mean loss.
    """

    tables: Tables
    samples: int
    sample_scale: int
    mean_scale: float

    def of_parameter(self, name: str, draws: int | None) -> ParameterValues:
        """Return gradient, variance and Kronecker factors of one parameter."""
        gradient, deviation = self.tables["gradient"][name]
        variance_scale = self.sample_scale**2 / self.samples
        tensors = {
            f"gradient/{name}": gradient * self.mean_scale,
            f"gradient_variance/{name}": deviation * variance_scale,
        }
        factors = {}
        for side, factor in zip("BA", self.tables.get("kfac", {}).get(name, []), strict=False):
            scaled = factor * self.mean_scale if side == "B" else factor
            terms = self.samples * ((draws or 1) if side == "B" else 1)
            factors[side], eigenvalues = spectrum_of(scaled, terms)
            if eigenvalues is not None:
                tensors[f"kfac/{name}/{side}"] = scaled
                tensors[f"kfac_eigenvalues/{name}/{side}"] = eigenvalues
        return ParameterValues(
            signal=float((gradient.double() * self.mean_scale).square().sum()),
            noise=float(deviation.double().sum() * variance_scale),
            factors=factors,
            tensors=tensors,
        )

    def of_samples(self, names: list[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return gradient norm and GGN traces of each sample, in some parameters together ``[n]``."""

        def summed(key: str) -> Tensor:
            return sum((self.tables[key][name].double().cpu() for name in names), torch.zeros((), device="cpu"))

        norms = summed("norms").sqrt() * self.sample_scale
        computed = [key for key in ("monte_carlo", "exact") if key in self.tables]
        return norms, {key: summed(key) * self.sample_scale for key in computed}


def _measured(
    layer: Layer, parameters: dict[str, ParameterValues], norms: Tensor, traces: dict[str, Tensor]
) -> Layer:
    """Make a row with the values of the parameters that the loss depends on."""
    noise = sum(values.noise for values in parameters.values())
    signal = sum(values.signal for values in parameters.values())
    means = {key: float(trace.mean()) for key, trace in traces.items()}
    median, percentile = np.quantile(norms.numpy(), [0.5, 0.95])
    return dataclasses.replace(
        layer,
        gradient_norm=math.sqrt(signal),
        sample_gradient_norm_median=float(median),
        sample_gradient_norm_95=float(percentile),
        signal_to_noise=None if noise == 0 else signal / noise,
        ggn_trace_exact=means.get("exact"),
        ggn_trace_monte_carlo=means.get("monte_carlo"),
        factors={
            f"{name.rpartition('.')[2]}.{side}": spectrum
            for name, values in parameters.items()
            for side, spectrum in values.factors.items()
        },
    )
