"""The rows of a profile, from the values of parameters."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass, field
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
    scales = (result.samples, 1.0) if result.reduction == "mean" else (1, 1 / result.samples)
    rows = Rows(tables, result.samples, settings["monte_carlo_samples"] or 1, *scales)
    for name in tables["gradient"]:
        rows.read(name)
    trainable = {name: p for name, p in named_parameters(model) if p.requires_grad}
    layers, modules = [], dict(named_modules(model))
    for owner in dict.fromkeys(owner_of(name) for name in trainable):
        owned = {name: p for name, p in trainable.items() if owner_of(name) == owner}
        layers.append(rows.row(owner or ROOT, modules[owner], owned))
    # the factors of single layers say nothing about the whole model
    total = dataclasses.replace(rows.row(TOTAL, modules[""], trainable), factors={})
    return Profile(
        layers,
        total,
        loss=result.loss * rows.mean_scale,
        samples=result.samples,
        batches=batches,
        settings=settings,
        seconds=time.perf_counter() - started,
        tensors={name: tensor.cpu() for name, tensor in rows.tensors.items()},
    )


@dataclass
class Rows:
    """Values over a data set, and the parts of a profile that are made of them.

    Args:
        tables: The values, for the loss as reduced.
        samples: The number of samples.
        draws: The number of Monte Carlo draws for each sample.
        sample_scale: The factor from a sample's share of the reduced loss to its own loss.
        mean_scale: The factor from the reduced loss to the mean loss.
        tensors: The tensors of the profile so far.
        signal: By parameter, squared norm of the mean loss's gradient.
        noise: By parameter, trace of the covariance of the samples' gradients.
        factors: By parameter, spectra of its Kronecker factors by side, ``"A"`` and ``"B"``.
    """

    tables: Tables
    samples: int
    draws: int
    sample_scale: int
    mean_scale: float
    tensors: dict[str, Tensor] = field(default_factory=dict)
    signal: dict[str, float] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    factors: dict[str, dict[str, Spectrum]] = field(default_factory=dict)

    def read(self, name: str) -> None:
        """Read the gradient, the variance and the Kronecker factors of one parameter."""
        gradient, deviation = self.tables["gradient"][name]
        variance_scale = self.sample_scale**2 / self.samples
        self.tensors[f"gradient/{name}"] = gradient * self.mean_scale
        self.tensors[f"gradient_variance/{name}"] = deviation * variance_scale
        self.signal[name] = float((gradient.double() * self.mean_scale).square().sum())
        self.noise[name] = float(deviation.double().sum() * variance_scale)
        self.factors[name] = {}
        for side, factor in zip("BA", self.tables.get("kfac", {}).get(name, []), strict=False):
            scaled = factor * self.mean_scale if side == "B" else factor
            terms = self.samples * (self.draws if side == "B" else 1)
            self.factors[name][side], eigenvalues = spectrum_of(scaled, terms)
            if eigenvalues is not None:
                self.tensors[f"kfac/{name}/{side}"] = scaled
                self.tensors[f"kfac_eigenvalues/{name}/{side}"] = eigenvalues

    def row(self, name: str, module: nn.Module, owned: dict[str, nn.Parameter]) -> Layer:
        """Return the row of some parameters; keep each sample's gradient norm and GGN trace in them ``[n]``."""
        layer = Layer(name, class_before_sharding(module).__name__, sum(p.numel() for p in owned.values()))
        reached = [full for full in owned if full in self.signal]
        if not reached:
            return layer

        def summed(key: str) -> Tensor:
            values = (self.tables[key][full].double().cpu() for full in reached)
            return sum(values, torch.zeros((), device="cpu"))

        norms = summed("norms").sqrt() * self.sample_scale
        self.tensors[f"sample_gradient_norm/{name}"] = norms
        traces: dict[str, float] = {}
        for key in ("monte_carlo", "exact"):  # the exact trace comes last and replaces the estimate
            if key in self.tables:
                trace = self.tensors[f"sample_ggn_trace/{name}"] = summed(key) * self.sample_scale
                traces[key] = float(trace.mean())
        noise, signal = (sum(values[full] for full in reached) for values in (self.noise, self.signal))
        median, percentile = np.quantile(norms.numpy(), [0.5, 0.95])
        return dataclasses.replace(
            layer,
            gradient_norm=math.sqrt(signal),
            sample_gradient_norm_median=float(median),
            sample_gradient_norm_95=float(percentile),
            signal_to_noise=None if noise == 0 else signal / noise,
            ggn_trace_exact=traces.get("exact"),
            ggn_trace_monte_carlo=traces.get("monte_carlo"),
            factors={
                f"{full.rpartition('.')[2]}.{side}": spectrum
                for full in reached
                for side, spectrum in self.factors[full].items()
            },
        )
