"""Square roots of the generalized Gauss-Newton matrix: S with ``S^T S`` the block of a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from packprop.engine.algebra.monoid import CAT
from packprop.engine.algebra.statistics import per_sample_grad
from packprop.extensions.sampled import Sampled
from packprop.types import ENTRYWISE, Extension, Row


@dataclass(frozen=True, eq=False)
class SqrtGGNExact(Extension):
    """Root of the GGN block, ``sqrt_ggn_exact``: ``[c, n, *p]``, one column for each model output.

    Columns come in the order of the entries of the loss's input; under cross entropy always class by class, and
    for each class position by position, as in ``[n, c, *t]``.

    Sums over positions use at least float32; packprop rounds each column to the parameter's precision once.

    Args:
        subsampling: Indices of samples; they come in this order, at the scale of the full batch.
    """

    subsampling: Sequence[int] | None = None
    cheaper: ClassVar[str] = "SqrtGGNMC"
    rounded: ClassVar[bool] = True
    savefield = "sqrt_ggn_exact"
    sample_axis = 1
    rows = (Row(ENTRYWISE, per_sample_grad, over_n=CAT[1], over_v=CAT[0], degree=0.5),)


@dataclass(frozen=True, eq=False)
class SqrtGGNMC(Sampled):
    """Root of a Monte Carlo estimate of the GGN block, ``sqrt_ggn_mc``: ``[m, n, *p]``, m draws.

    Sums over positions use at least float32; packprop rounds each column to the parameter's precision once.

    Args:
        mc_samples: Draws for each sample of the batch.
        subsampling: Indices of samples; they come in this order, at the scale of the full batch.
        generator: Makes the draws repeatable, and leaves the global random state alone.
    """

    rounded: ClassVar[bool] = True
    savefield = "sqrt_ggn_mc"
    sample_axis = 1

    @property
    def rows(self) -> tuple[Row, ...]:
        """The gradients of sampled columns."""
        return (Row(self.seed, per_sample_grad, over_n=CAT[1], over_v=CAT[0], degree=0.5),)
