"""Kronecker factors of the GGN, from columns that are swept back: KFAC, KFLR, EKFAC.

# NOTE [Kronecker factors]
A weight's block is approximated by ``B kron A`` in the order of its entries ``[o, i]``, returned as
``[B, A]`` (grouped convolutions: ``B`` over all output channels, ``A`` averaged over groups).
``B = sum_v sum_n s s^T`` is ``[o, o]`` with s a cotangent, and carries the scale of the loss as reduced;
``A = 1/N sum_n x x^T`` is ``[i, i]`` with x an input. A bias, and every other parameter that is no matrix
applied to inputs (scales and shifts of normalisation, raw parameters), has a block of its own ``[B]``, which is
exact for the columns of its seed: ``B = sum_v sum_n j j^T`` with j the gradient of a sample.

Where a weight is shared over positions s (pixels, time steps):
``"mixed"``: ``A`` sums ``x x^T`` over positions, ``B`` takes cotangents summed over positions, as in BackPACK;
``"expand"``: every position counts as a sample: ``A`` averages over positions, ``B`` sums ``s s^T`` over them;
``"reduce"``: inputs are averaged, cotangents summed over positions first (both Eschenhagen et al. 2023).

# NOTE [Fresh draws]
Eigenvectors fit the draws that they come from: the squares of these draws are too large along the first
eigenvectors and too small along the last, where a damped inverse looks at them most closely. So the corrected
eigenvalues of the sampled kind are those of other draws. A factor's eigenvectors then depend on nothing that
its eigenvalues are made of, and the mean of the eigenvalues is the diagonal of the exact block in this basis.
``benchmarks/attribution.py`` measures what influence gains by it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from packprop.algebra.factors import (
    Approximation,
    Otherwise,
    cotangent_gram,
    input_gram,
    is_skipped,
    rotated_sum_sq,
)
from packprop.algebra.kronecker import Eigen, eigenvectors
from packprop.algebra.monoid import KEEP
from packprop.algebra.structures import entry_order_of
from packprop.extensions.arguments import require_one_of
from packprop.extensions.sampled import Sampled
from packprop.types import EMPIRICAL, EXACT, INPUTS, Extension, Row, Seed

Fisher = Literal["sampled", "empirical"]
Columns = Literal["sampled", "empirical", "exact"]


@dataclass(frozen=True, eq=False)
class KFAC(Sampled):
    """Kronecker factors of the GGN from sampled columns, ``kfac``: ``[B, A]`` or ``[B]``.

    The method is that of Martens and Grosse (2015) and, for convolutions, of Grosse and Martens (2016).
    See NOTE [Kronecker factors] for conventions and scales. Both factors are added up, and handed over, in at
    least float32.

    Args:
        mc_samples: Draws for each sample of the batch.
        subsampling: Indices of samples; B is their sum at the scale of the full batch, A their mean.
        generator: Makes the draws repeatable; the global random state is left alone then.
        approximation: How positions that share a weight are treated.
        fisher: ``"sampled"``: targets are drawn from the model. ``"empirical"``: the targets of the data are
            taken, as one column at the scale of a draw (Kunstner et al. 2019 on what is lost); nothing is
            drawn then.
        otherwise: What becomes of a parameter with a factor of more than 2^14 rows. By default the diagonal of
            that factor takes its place, ``[p]``, and a warning names the parameters, once; everything in
            ``packprop.kronecker`` takes a vector for a diagonal matrix. ``"diagonal"``: the same, without a
            warning. ``"error"``: the pass is refused. ``"skip"``: nothing is saved on the parameter, and a
            warning names it. The input factor of a table with so many rows is given as its diagonal in any
            case: it has no other entries, unless ``"reduce"`` takes averages.
    """

    approximation: Approximation = "mixed"
    fisher: Fisher = "sampled"
    otherwise: Otherwise | None = None
    savefield = "kfac"

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        super().__post_init__()
        asked = f"KFAC(approximation={self.approximation!r}, fisher={self.fisher!r}) was asked for."
        require_one_of(asked, "approximation", self.approximation, get_args(Approximation))
        require_one_of(asked, "fisher", self.fisher, get_args(Fisher))
        require_one_of(asked, "otherwise", self.otherwise, (*get_args(Otherwise), None))

    @property
    def rows(self) -> tuple[Row, ...]:
        """Second moments of cotangents and of inputs."""
        seed = EMPIRICAL if self.fisher == "empirical" else self.seed
        return factor_rows(seed, self.approximation, self.otherwise)

    def finish(self, values: list[Any], samples: int) -> list[Tensor] | None:
        """``B``, and ``A`` divided by the number of samples."""
        return finished_factors(values, samples)


@dataclass(frozen=True, eq=False)
class KFLR(Extension):
    """Kronecker factors of the GGN from every column of its root, ``kflr``: ``[B, A]`` or ``[B]``.

    The limit of ``KFAC`` for infinitely many draws (Botev et al. 2017). See NOTE [Kronecker factors] for
    conventions and scales. Both factors are added up, and handed over, in at least float32.

    Args:
        subsampling: Indices of samples; B is their sum at the scale of the full batch, A their mean.
        approximation: How positions that share a weight are treated.
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
        require_one_of(asked, "approximation", self.approximation, get_args(Approximation))
        require_one_of(asked, "otherwise", self.otherwise, (*get_args(Otherwise), None))

    @property
    def rows(self) -> tuple[Row, ...]:
        """Second moments of cotangents and of inputs."""
        return factor_rows(EXACT, self.approximation, self.otherwise)

    def finish(self, values: list[Any], samples: int) -> list[Tensor] | None:
        """``B``, and ``A`` divided by the number of samples."""
        return finished_factors(values, samples)


@dataclass(frozen=True, eq=False)
class EKFAC(Sampled):
    """Kronecker factors of the GGN with corrected eigenvalues, ``ekfac``: a ``kronecker.Eigen``.

    The eigenvectors are those of ``B kron A``. The eigenvalues are the diagonal of the block itself in their
    basis: squares of rotated per-sample gradients, summed over samples and columns. Of all matrices with these
    eigenvectors this one is nearest to the block, and it has the block's trace (George et al. 2018). ``values``
    are ``[o, i]`` and carry the scale of the loss as reduced, ``vectors`` are ``[U_B, U_A]``; for a parameter
    that is no matrix applied to inputs they are ``[p]`` and ``[U_B]``, the exact block. Squares are added up
    in at least float32, and everything is handed over so. Under ``create_graph=True`` eigenvalues are
    differentiated with the eigenvectors held fixed.

    With ``fisher="sampled"`` the eigenvectors come from ``mc_samples`` draws for each sample, and the
    eigenvalues from as many fresh ones, in a sweep of their own: given the eigenvectors, their mean over draws
    is what the exact block has in the same basis. See NOTE [Fresh draws]. Columns that are not drawn are swept
    twice, unless one sweep brings all of them, as for the empirical Fisher or a small graph. See NOTE [Second
    pass] (``packprop/engine/column_sweeps.py``).

    Args:
        mc_samples: Draws for each sample of the batch, for the eigenvectors and again for the eigenvalues.
        subsampling: Indices of samples, at the scale of the full batch.
        generator: Makes the draws repeatable; the global random state is left alone then.
        approximation: How positions that share a weight are treated in the factors, and so in the eigenvectors;
            the eigenvalues are those of the block in any case.
        fisher: ``"sampled"``: targets are drawn from the model. ``"empirical"``: the targets of the data are
            taken. ``"exact"``: every column of the root of the loss's Hessian is taken. Neither draws.
        otherwise: As for ``KFAC``. With a diagonal unit vectors take the place of a large factor's
            eigenvectors; the eigenvalues are those of the block in that basis.
    """

    approximation: Approximation = "mixed"
    fisher: Columns = "sampled"
    otherwise: Otherwise | None = None
    cheaper: ClassVar[str] = "KFAC"
    savefield = "ekfac"

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        super().__post_init__()
        asked = f"EKFAC(approximation={self.approximation!r}, fisher={self.fisher!r}) was asked for."
        require_one_of(asked, "approximation", self.approximation, get_args(Approximation))
        require_one_of(asked, "fisher", self.fisher, get_args(Columns))
        require_one_of(asked, "otherwise", self.otherwise, (*get_args(Otherwise), None))

    @property
    def rows(self) -> tuple[Row, ...]:
        """Factors, the order of entries, and squares in the eigenbasis of the factors."""
        seed = {"sampled": self.seed, "empirical": EMPIRICAL, "exact": EXACT}[self.fisher]
        order = Row(seed, entry_order_of, over_n=KEEP, over_v=KEEP, degree=0)
        factors = factor_rows(seed, self.approximation, self.otherwise)
        again = replace(seed, fresh=True) if self.fisher == "sampled" else seed  # see NOTE [Fresh draws]
        return (*factors, order, Row(again, rotated_sum_sq, after=_rotations))

    def finish(self, values: list[Any], samples: int) -> Eigen | None:
        """The eigendecomposition; its eigenvalues are the squares. ``None`` if a factor was skipped."""
        left, right, order, squares = values
        if is_skipped(left) or is_skipped(right):
            return None
        return Eigen(squares, [left] if right is None else [left, right], order)


def factor_rows(
    seed: Seed, approximation: Approximation, otherwise: Otherwise | None = None
) -> tuple[Row, ...]:
    """The rows of both factors: second moments of cotangents, and of inputs."""
    options: dict[str, Any] = {"approximation": approximation, "otherwise": otherwise or "diagonal"}
    cotangents, inputs = functools.partial(cotangent_gram, **options), functools.partial(input_gram, **options)
    return (Row(seed, cotangents), Row(INPUTS, inputs, degree=0))


def finished_factors(values: list[Any], samples: int) -> list[Tensor] | None:
    """``[B, A]`` or ``[B]`` from the sums of both rows; ``A`` is divided by the number of samples.

    ``None`` if one of them was skipped: it is empty then.
    """
    cotangents, inputs = values
    if (cotangents is not None and not cotangents.numel()) or (inputs is not None and not inputs.numel()):
        return None
    if inputs is None:
        return [cotangents]
    # divided in place: it is the largest tensor here, and nobody else uses it
    return [cotangents, inputs / samples if inputs.requires_grad else inputs.div_(samples)]


def _rotations(values: list[Any]) -> list[Any]:
    """Results of the first pass with eigenvectors in place of the factors."""
    cotangents, inputs, order = values
    return [eigenvectors(cotangents), None if inputs is None else eigenvectors(inputs), order]
