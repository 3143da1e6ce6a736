"""Kronecker factors of the GGN, from columns that packprop sweeps back: KFAC, KFLR, EKFAC.

# NOTE [Kronecker factors]
``B kron A`` approximates a weight's block in the order of its entries ``[o, i]``, returned as ``[B, A]``
(grouped convolutions: ``B`` over all output channels, ``A`` averaged over groups).
``B = sum_v sum_n y y^T`` is ``[o, o]`` with y a cotangent, and carries the scale of the loss as reduced;
``A = 1/N sum_n x x^T`` is ``[i, i]`` with x an input. A bias, and every other parameter that is no matrix
applied to inputs (scales and shifts of normalisation, raw parameters), has a block of its own ``[B]``, which is
exact for the columns of its seed: ``B = sum_v sum_n j j^T`` with j a column's gradient for one sample.

If several positions (pixels, time steps) share a weight:
``"mixed"``: ``A`` sums ``x x^T`` over positions, ``B`` takes cotangents summed over positions, as in BackPACK;
``"expand"``: every position counts as a sample: ``A`` averages over positions, ``B`` sums ``y y^T`` over them;
``"reduce"``: averages inputs and sums cotangents over positions first (both Eschenhagen et al. 2023).

# NOTE [Fresh draws]
Eigenvectors fit the draws that they come from. The squares of these draws are too large along the first
eigenvectors and too small along the last, which matter most to a damped inverse. So sampled corrected
eigenvalues come from other draws. A factor's eigenvectors then do not depend on the draws of its eigenvalues,
and the mean of the eigenvalues is the diagonal of the exact block in this basis. An eigenvalue is a mean
over draws alone, a factor over other entries as well: so an eigenvalue gets ``EIGENVALUE_DRAWS`` times as many
draws. ``benchmarks/attribution`` measures what influence gains by it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from packprop.engine.algebra.factors import (
    Approximation,
    correlations,
    cotangent_gram,
    homogeneous_sum,
    input_gram,
    is_skipped,
    rotated_sum_sq,
)
from packprop.engine.algebra.kronecker import Eigen, eigenvectors
from packprop.engine.algebra.monoid import KEEP
from packprop.engine.algebra.structures import entry_order_of
from packprop.extensions.arguments import Otherwise, require_one_of, require_otherwise
from packprop.extensions.sampled import Sampled
from packprop.types import EMPIRICAL, EXACT, INPUTS, Extension, Row, Seed

APPROXIMATIONS = get_args(Approximation)

EIGENVALUE_DRAWS = 4
"""Fresh draws for eigenvalues, for each draw for eigenvectors; they share a vectorised sweep."""

Fisher = Literal["sampled", "empirical"]
Columns = Literal["sampled", "empirical", "exact"]


class Factors(Extension):
    """An extension that saves Kronecker factors ``[B, A]`` or ``[B]``."""

    def finish(self, values: list[Any], samples: int) -> list[Tensor] | None:
        """Return ``B``, and ``A`` divided by the number of samples; ``None`` if one of them was skipped."""
        cotangents, inputs = values
        if is_skipped(cotangents) or is_skipped(inputs):
            return None
        if inputs is None:
            return [cotangents]
        # divide in place: it is the largest tensor here, and nobody else uses it
        return [cotangents, inputs / samples if inputs.requires_grad else inputs.div_(samples)]


@dataclass(frozen=True, eq=False)
class _FromColumns(Sampled):
    """An extension with Kronecker factors from a choice of columns."""

    approximation: Approximation = "mixed"
    fisher: Columns = "sampled"
    otherwise: Otherwise | None = None
    fishers: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        super().__post_init__()
        asked = f"{self.name}(approximation={self.approximation!r}, fisher={self.fisher!r}) was asked for."
        require_one_of(asked, "approximation", self.approximation, APPROXIMATIONS)
        require_one_of(asked, "fisher", self.fisher, self.fishers)
        require_otherwise(asked, self.otherwise)


@dataclass(frozen=True, eq=False)
class KFAC(Factors, _FromColumns):
    """Kronecker factors of the GGN from sampled columns, ``kfac``: ``[B, A]`` or ``[B]``.

    The method is that of Martens and Grosse (2015) and, for convolutions, of Grosse and Martens (2016). See
    NOTE [Kronecker factors] for conventions and scales. Both factors add up in at least float32, and keep this
    precision.

    Args:
        mc_samples: Draws for each sample of the batch.
        subsampling: Indices of samples; B is their sum at the scale of the full batch, A their mean.
        generator: Makes the draws repeatable, and leaves the global random state alone.
        approximation: The treatment of positions that share a weight.
        fisher: ``"sampled"``: draws targets from the model. ``"empirical"``: takes the targets of the data as
            one column at the scale of a draw (Kunstner et al. 2019 on the loss); it draws nothing.
        otherwise: The treatment of a parameter with a factor of more than 2^14 rows. By default the diagonal of
            that factor takes its place, ``[p]``, and one warning names the parameters; everything in
            ``packprop.kronecker`` takes a vector for a diagonal matrix. ``"diagonal"``: the same, without a
            warning. ``"error"``: refuses the pass. ``"skip"``: saves nothing on the parameter, and a warning
            names it. The input factor of a table with so many rows is always its diagonal: it has no other
            entries, unless ``"reduce"`` takes averages.
    """

    fisher: Fisher = "sampled"
    fishers = get_args(Fisher)
    savefield = "kfac"

    @property
    def rows(self) -> tuple[Row, ...]:
        """The second moments of cotangents and of inputs."""
        seed = EMPIRICAL if self.fisher == "empirical" else self.seed
        return factor_rows(seed, self.approximation, self.otherwise)


@dataclass(frozen=True, eq=False)
class KFLR(Factors):
    """Kronecker factors of the GGN from every column of its root, ``kflr``: ``[B, A]`` or ``[B]``.

    This is the limit of ``KFAC`` for infinitely many draws (Botev et al. 2017). See NOTE [Kronecker factors]
    for conventions and scales. Both factors add up in at least float32, and keep this precision.

    Args:
        subsampling: Indices of samples; B is their sum at the scale of the full batch, A their mean.
        approximation: The treatment of positions that share a weight.
        otherwise: As for ``KFAC``.
    """

    subsampling: Sequence[int] | None = None
    approximation: Approximation = "mixed"
    otherwise: Otherwise | None = None
    cheaper: ClassVar[str] = "KFAC"
    savefield = "kflr"

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        super().__post_init__()
        asked = f"KFLR(approximation={self.approximation!r}) was asked for."
        require_one_of(asked, "approximation", self.approximation, APPROXIMATIONS)
        require_otherwise(asked, self.otherwise)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The second moments of cotangents and of inputs."""
        return factor_rows(EXACT, self.approximation, self.otherwise)


@dataclass(frozen=True, eq=False)
class EKFAC(_FromColumns):
    """Kronecker factors of the GGN with corrected eigenvalues, ``ekfac``: a ``kronecker.Eigen``.

    The eigenvectors are those of ``B kron A``. The eigenvalues are the diagonal of the block itself in their
    basis: squares of rotated per-sample gradients, summed over samples and columns. Of all matrices with these
    eigenvectors this one is nearest to the block, and it has the block's trace (George et al. 2018). ``values``
    are ``[o, i]`` and carry the scale of the loss as reduced, ``vectors`` are ``[U_B, U_A]``. For a parameter
    that is no matrix applied to inputs they are ``[p]`` and ``[U_B]``, the exact block. Squares add up in at
    least float32, and everything keeps this precision. Under ``create_graph=True``, derivatives of the
    eigenvalues hold the eigenvectors fixed. ``correlations`` say how the block of a weight meets that of a
    bias; ``influence`` joins both. See NOTE [Weight and bias] (``engine/algebra/coupled.py``).

    With ``fisher="sampled"``, the eigenvectors come from ``mc_samples`` draws for each sample, and the
    eigenvalues from four times as many fresh ones, in a sweep of their own. Given the eigenvectors, their mean
    over draws equals the diagonal of the exact block in the same basis. See NOTE [Fresh draws]. packprop sweeps
    other columns twice, unless one sweep brings all of them, as for the empirical Fisher or a small graph. See
    NOTE [Second pass] (``engine/passes/column_sweeps.py``).

    Args:
        mc_samples: Draws for each sample of the batch, for the eigenvectors; four times as many for the
            eigenvalues.
        subsampling: Indices of samples, at the scale of the full batch.
        generator: Makes the draws repeatable, and leaves the global random state alone.
        approximation: The treatment of positions that share a weight in the factors, and so in the
            eigenvectors; the eigenvalues always belong to the block.
        fisher: ``"sampled"``: draws targets from the model. ``"empirical"``: takes the targets of the data.
            ``"exact"``: takes every column of the root of the loss's Hessian. The last two draw nothing.
        otherwise: As for ``KFAC``. If it keeps a diagonal, unit vectors take the place of a large factor's
            eigenvectors; the eigenvalues are those of the block in that basis.
    """

    fishers = get_args(Columns)
    cheaper: ClassVar[str] = "KFAC"
    savefield = "ekfac"

    @property
    def rows(self) -> tuple[Row, ...]:
        """The factors, the order of entries, sums of inputs, and squares in the eigenbasis of the factors."""
        seed = {"sampled": self.seed, "empirical": EMPIRICAL, "exact": EXACT}[self.fisher]
        order = Row(seed, entry_order_of, over_n=KEEP, over_v=KEEP, degree=0)
        factors = factor_rows(seed, self.approximation, self.otherwise)
        total = functools.partial(homogeneous_sum, approximation=self.approximation)
        again = seed
        if self.fisher == "sampled":  # see NOTE [Fresh draws]
            again = replace(seed, mc_samples=EIGENVALUE_DRAWS * self.mc_samples, fresh=True)
        return (*factors, order, Row(INPUTS, total, degree=0), Row(again, rotated_sum_sq, after=_rotations))

    def finish(self, values: list[Any], samples: int) -> Eigen | None:
        """Return the eigendecomposition, with squares as eigenvalues; ``None`` if a factor was skipped."""
        left, right, order, along, squares = values
        if is_skipped(left) or is_skipped(right):
            return None
        return Eigen(squares, [left] if right is None else [left, right], order, along)


def factor_rows(
    seed: Seed, approximation: Approximation, otherwise: Otherwise | None = None
) -> tuple[Row, ...]:
    """Make the rows of both factors: second moments of cotangents, and of inputs."""
    cotangents, inputs = _factor_statistics(approximation, otherwise or "diagonal")
    return (Row(seed, cotangents), Row(INPUTS, inputs, degree=0))


@functools.cache
def _factor_statistics(
    approximation: Approximation, otherwise: Otherwise
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the statistics of both factors: the same ones at each call, so that passes with them are equal."""
    options: dict[str, Any] = {"approximation": approximation, "otherwise": otherwise}
    return functools.partial(cotangent_gram, **options), functools.partial(input_gram, **options)


def _rotations(values: list[Any]) -> list[Any]:
    """Return the results of the first pass with eigenvectors for factors, and correlations for sums."""
    cotangents, inputs, order, total = values
    left, right = eigenvectors(cotangents), None if inputs is None else eigenvectors(inputs)
    return [left, right, order, None if right is None else correlations(inputs, right, total)]
