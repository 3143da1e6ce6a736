"""One row of a profile: the facts about one layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from packprop.engine.algebra import eigvalsh

ROOT = "(model)"
"""The name for the layer of the parameters that the model itself owns."""

TOTAL = "(total)"
"""The name of the row of all parameters."""


@dataclass(frozen=True)
class Spectrum:
    """Summary of the eigenvalues of one Kronecker factor; see NOTE [Profile quantities].

    Args:
        size: Side of the matrix.
        built: True if the factor was built, false if it is too large.
        rank: Number of eigenvalues above rounding error; ``None`` if the matrix is not finite.
        largest: Largest eigenvalue.
        smallest: Smallest eigenvalue above rounding error.
        condition: ``largest / smallest``; it is the condition of the matrix only if ``rank == size``.
    """

    size: int
    built: bool = True
    rank: int | None = None
    largest: float | None = None
    smallest: float | None = None
    condition: float | None = None


@dataclass(frozen=True)
class Layer:
    """One row of the table, or the total; see NOTE [Profile quantities].

    Args:
        name: Name of the module.
        kind: Name of its class.
        parameters: Number of trainable parameters; tied parameters count in the layer that comes first.
        gradient_norm: Norm of the mean loss's gradient. This number and all that follow are ``None`` if
            the loss does not depend on the layer.
        sample_gradient_norm_median: Median of the norms of single samples' gradients.
        sample_gradient_norm_95: 95th percentile of these norms.
        signal_to_noise: Squared gradient norm over the trace of the samples' covariance; ``None``
            if that is zero, as for one sample.
        ggn_trace_exact: Trace of the GGN block; ``None`` if it was not computed.
        ggn_trace_monte_carlo: Monte Carlo estimate of this trace; ``None`` if it was not computed.
        factors: Kronecker factors by name, ``"weight.A"`` and so on.
    """

    name: str
    kind: str
    parameters: int
    gradient_norm: float | None = None
    sample_gradient_norm_median: float | None = None
    sample_gradient_norm_95: float | None = None
    signal_to_noise: float | None = None
    ggn_trace_exact: float | None = None
    ggn_trace_monte_carlo: float | None = None
    factors: dict[str, Spectrum] = field(default_factory=dict)

    def factor(self, side: str) -> Spectrum | None:
        """Return the first factor of a side, ``"A"`` or ``"B"``, if there is one."""
        return next((found for name, found in self.factors.items() if name.endswith(f".{side}")), None)


def factor_key(layer: Layer, name: str) -> str:
    """Return the key of a layer's factor in ``Profile.tensors``, without ``kfac/`` or ``kfac_eigenvalues/``."""
    parameter, _, side = name.rpartition(".")
    return f"{parameter}/{side}" if layer.name == ROOT else f"{layer.name}.{parameter}/{side}"


def spectrum_of(factor: Tensor, terms: int) -> tuple[Spectrum, Tensor | None]:
    """Return the spectrum of a sum of ``terms`` outer products, and its ascending eigenvalues, if computed."""
    size = factor.shape[1]
    if len(factor) < size:
        return Spectrum(size, built=False), None
    if not bool(factor.isfinite().all()):
        return Spectrum(size), None
    eigenvalues = eigvalsh(factor.detach().cpu().double())
    largest = float(eigenvalues[-1])
    error = torch.finfo(factor.dtype).eps * (size + 2 * math.sqrt(terms))
    above_error = eigenvalues[eigenvalues > largest * error]
    if largest <= 0:
        return Spectrum(size, rank=0), eigenvalues
    smallest = float(above_error[0])
    return Spectrum(size, True, len(above_error), largest, smallest, largest / smallest), eigenvalues


def owner_of(parameter: str) -> str:
    """Return the name of the module that owns a parameter; empty for the model itself."""
    return parameter.rpartition(".")[0]
