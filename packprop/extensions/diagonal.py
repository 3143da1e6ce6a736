"""Diagonals of the generalized Gauss-Newton matrix (GGN), of the loss as reduced (Schraudolph 2002).

``G = sum_n J_n^T H_n J_n``, with ``J_n`` the Jacobian of the loss's input in the parameters and ``H_n`` the
Hessian of the loss in its input. For cross entropy and squared error, G is the Fisher information. An exact
diagonal sweeps back every column of a square root of ``H_n``. A Monte Carlo estimate sweeps back ``mc_samples``
gradients, each for targets drawn from the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from packprop.engine.algebra.monoid import ADD_IN_PLACE, CAT
from packprop.engine.algebra.statistics import batch_sq, sum_sq, token_batch_sq
from packprop.extensions.by_token import BySampleOrToken, ByUnit, Per
from packprop.extensions.sampled import Sampled
from packprop.types import EXACT, EXACT_BY_TOKEN, Extension, Row


@dataclass(frozen=True, eq=False)
class DiagGGNExact(Extension):
    """Diagonal of the GGN, ``diag_ggn_exact``: ``[*p]``.

    Squares add up over columns and samples in at least float32, and keep this precision.

    Args:
        subsampling: Indices of samples, at the scale of the full batch.
    """

    subsampling: Sequence[int] | None = None
    cheaper: ClassVar[str] = "DiagGGNMC"
    savefield = "diag_ggn_exact"
    rows = (Row(EXACT, sum_sq),)


@dataclass(frozen=True, eq=False)
class BatchDiagGGNExact(BySampleOrToken):
    """Diagonal of each sample's GGN, ``diag_ggn_exact_batch``: ``[n, *p]``; rows sum to ``diag_ggn_exact``.

    Squares add up over columns in at least float32, and keep this precision.

    Args:
        subsampling: Indices of samples; rows come in their order, at the scale of the full batch.
        per: ``"token"`` for the diagonal of each token's GGN, ``diag_ggn_exact_batch_token``: ``[n, t, *p]``,
            as in ``packprop/extensions/by_token.py``; the rows of a sample sum to its own.
    """

    cheaper: ClassVar[str] = "BatchDiagGGNMC"
    savefield = "diag_ggn_exact_batch"
    of_samples = Row(EXACT, batch_sq, over_n=CAT[0])
    of_tokens = Row(EXACT_BY_TOKEN, token_batch_sq, over_n=CAT[1], over_v=ADD_IN_PLACE)


@dataclass(frozen=True, eq=False)
class DiagGGNMC(Sampled):
    """Unbiased Monte Carlo estimate of the GGN's diagonal, ``diag_ggn_mc``: ``[*p]``.

    Squares add up over columns and samples in at least float32, and keep this precision.

    Args:
        mc_samples: Draws for each sample of the batch.
        subsampling: Indices of samples, at the scale of the full batch.
        generator: Makes the draws repeatable, and leaves the global random state alone.
    """

    savefield = "diag_ggn_mc"

    @property
    def rows(self) -> tuple[Row, ...]:
        """The squares of sampled columns."""
        return (Row(self.seed, sum_sq),)


@dataclass(frozen=True, eq=False)
class BatchDiagGGNMC(ByUnit, Sampled):
    """Monte Carlo estimate of each sample's GGN diagonal, ``diag_ggn_mc_batch``: ``[n, *p]``.

    Squares add up over columns in at least float32, and keep this precision.

    Args:
        mc_samples: Draws for each sample of the batch.
        subsampling: Indices of samples; rows come in their order, at the scale of the full batch.
        generator: Makes the draws repeatable, and leaves the global random state alone.
        per: ``"token"`` for the diagonal of each token's GGN, ``diag_ggn_mc_batch_token``: ``[n, t, *p]``,
            as in ``packprop/extensions/by_token.py``, from ``mc_samples`` draws for each token.
    """

    per: Per = "sample"
    savefield = "diag_ggn_mc_batch"

    @property
    def rows(self) -> tuple[Row, ...]:
        """The squares of sampled columns, sample by sample or token by token."""
        if self.per == "sample":
            return (Row(self.seed, batch_sq, over_n=CAT[0]),)
        seed = replace(self.seed, by_token=True)
        return (Row(seed, token_batch_sq, over_n=CAT[1], over_v=ADD_IN_PLACE),)
