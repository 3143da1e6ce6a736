"""The extensions of a profile, and the meaning of its columns.

# NOTE [Profile quantities]
Let ``L = 1/N sum_n l_n`` be the mean loss over N samples; a loss that sums is divided by N first.
``l_n`` is the loss of sample n alone (to be exact, N times its share of L, where samples differ in
weight). Rows are layers: modules that own trainable parameters. A row takes all of these (weight and
bias) together. With ``g_n`` the gradient of ``l_n`` and ``g`` that of ``L`` in a layer's parameters:

gradient norm:    ``|g|``.
sample norms:     ``|g_n|``; their median and 95th percentile over n.
signal to noise:  ``|g|^2 / tr S``, with ``S = 1/N sum_n (g_n - g)(g_n - g)^T`` the covariance of
                  per-sample gradients. Its inverse is the simple noise scale of McCandlish et al.
                  (2018, arXiv:1812.06162): the batch size at which the noise of a batch's gradient
                  is as large as its signal. Where N samples stand for a larger population, values
                  near 1/N cannot be told from zero.
GGN trace:        ``tr 1/N sum_n J_n^T H_n J_n``, the trace of the layer's block of the generalized
                  Gauss-Newton matrix (Schraudolph 2002) of ``L``: exact from every column of a root
                  of ``H_n``, Monte Carlo from targets drawn from the model.
condition:        of the Kronecker factors A (second moment of inputs) and B (of cotangents) of KFAC:
                  largest over smallest of the eigenvalues above rounding error, whose number is the
                  rank. A matrix of rank below its size is singular. The threshold is
                  ``largest * epsilon * (size + 2 sqrt(terms))``: ``size`` as for any matrix (Golub
                  and Van Loan 2013, section 5.4), the rest for the random walk of the rounding
                  errors of a sum over that many samples and draws, in the model's precision.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packprop.engine.algebra import (
    CAT,
    MOMENTS,
    Dense,
    Lookup,
    Moments,
    Structure,
    cotangent_gram,
    input_gram,
    moments,
    rows,
    sq_norm,
)
from packprop.extensions import KFAC, BatchL2Grad
from packprop.types import EXACT, GRADIENT, INPUTS, Extension, Row, Seed

EXACT_OUTPUTS = 32
"""The number of a sample's outputs up to which the exact GGN trace is cheap: one backward pass for each."""

LARGEST_FACTOR = 2048
"""Side of the largest Kronecker factor; the time for eigenvalues grows with its third power."""


class GradientMoments(Extension):
    """Sum and summed squared deviation of the samples' gradients: two tensors ``[*p]``."""

    savefield = "gradient_moments"
    rows = (Row(GRADIENT, moments, over_n=MOMENTS),)

    def finish(self, values: list[Any], samples: int) -> list[Tensor]:
        """Return the sum and the summed squared deviation."""
        total: Moments = values[0]
        return [total.mean * total.samples, total.deviation]


@dataclass(frozen=True, eq=False)
class SampleGGNTrace(Extension):
    """Trace of each sample's GGN block ``[n]``: the summed squared norms of the swept columns.

    The sum of the GGN's diagonal is the same number, but needs the entries of every column.
    """

    seed: Seed

    @property
    def savefield(self) -> str:  # type: ignore[override]  # a choice of each instance here
        """The attribute; its name tells exact traces from estimates."""
        return f"sample_ggn_trace_{'exact' if self.seed == EXACT else 'monte_carlo'}"

    @property
    def rows(self) -> tuple[Row, ...]:
        """The squared norms, one for each sample."""
        return (Row(self.seed, sq_norm, over_n=CAT[0]),)

    @property
    def name(self) -> str:
        """Name in messages."""
        return "GGN trace"


@dataclass(frozen=True, eq=False)
class BoundedKFAC(KFAC):
    """``KFAC`` without its large factors: an empty tensor ``[0, size]`` stands in for each of them.

    ``drawn_from`` is the seed of the generator, so that a checkpoint of other draws belongs to another run.
    """

    largest: int = LARGEST_FACTOR
    drawn_from: int = 0

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of KFAC, each with the bound on its factor."""
        cotangents, inputs = (
            functools.partial(factor, largest=self.largest, approximation=self.approximation)
            for factor in (_cotangent_factor, _input_factor)
        )
        return (Row(super().rows[0].seed, cotangents), Row(INPUTS, inputs, degree=0))

    def finish(self, values: list[Any], samples: int) -> list[Tensor]:
        """Return ``[B, A]`` or ``[B]``, with empty tensors for missing factors."""
        cotangents, inputs = values
        return [cotangents] if inputs is None else [cotangents, inputs / samples]


def _cotangent_factor(structure: Structure, largest: int, approximation: Any) -> Tensor:
    shape = rows(structure).shape[2:] if isinstance(structure, Dense) else structure.given_cotangent.shape[3:]
    size = shape.numel()
    return cotangent_gram(structure, approximation) if size <= largest else torch.empty(0, size, device="cpu")


def _input_factor(structure: Structure, largest: int, approximation: Any) -> Tensor | None:
    if isinstance(structure, Dense):
        return None
    size = structure.entries if isinstance(structure, Lookup) else structure.shape[-1]
    return input_gram(structure, approximation) if size <= largest else torch.empty(0, size, device="cpu")


def extensions_of(
    curvature: bool, exact: bool, draws: int, largest_factor: int, seed: int, device: torch.device
) -> dict[str, Extension]:
    """Return the extensions of the profile, by short names."""
    extensions: dict[str, Extension] = {"gradient": GradientMoments(), "norms": BatchL2Grad()}
    if curvature:
        generator = torch.Generator(device=device).manual_seed(seed)
        kfac = BoundedKFAC(draws, generator=generator, largest=largest_factor, drawn_from=seed)
        extensions |= {"monte_carlo": SampleGGNTrace(kfac.rows[0].seed), "kfac": kfac}
    if curvature and exact:
        extensions["exact"] = SampleGGNTrace(EXACT)
    return extensions
