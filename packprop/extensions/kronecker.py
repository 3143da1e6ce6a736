"""Kronecker-factored curvature.

# NOTE [Kronecker factors]
A weight's block is approximated by ``B kron A`` in the order of its entries ``[o, i]``, returned as
``[B, A]`` (grouped convolutions: ``B`` over all output channels, ``A`` averaged over groups).
``B = sum_v sum_n s s^T`` is ``[o, o]`` and carries the scale of the loss as reduced;
``A = 1/N sum_n x x^T`` is ``[i, i]``. A bias, and every parameter that no input multiplies matrix-wise (scales
and shifts of normalisation, raw parameters), is a block of its own ``[B]``, exact in its seed:
``B = sum_v sum_n j j^T`` with j the gradient of a sample.

Where a weight is shared over positions s (pixels, time steps):
``"mixed"``: ``A`` sums ``x x^T`` over positions, ``B`` takes cotangents summed over positions, as in BackPACK;
``"expand"``: every position counts as a sample: ``A`` averages over positions, ``B`` sums ``s s^T`` over them;
``"reduce"``: inputs are averaged, cotangents summed over positions first (both Eschenhagen et al. 2023).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from packprop.algebra.factors import Approximation, cotangent_gram, input_gram, input_sum, rotated_sum_sq
from packprop.algebra.kronecker import Eigen, eigenvectors
from packprop.algebra.monoid import KEEP
from packprop.algebra.structures import entry_order_of
from packprop.curvature.recursion import Curvature, averaged_factors
from packprop.errors import BadInput
from packprop.extensions.sampled import Sampled
from packprop.types import EMPIRICAL, EXACT, GRAPH, INPUTS, Extension, Row, Seed

Fisher = Literal["sampled", "empirical"]
Columns = Literal["sampled", "empirical", "exact"]


def _require_one_of(asked: str, where: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise BadInput(
            asked,
            where,
            "it is not one of those that are known",
            f"choose from {', '.join(map(repr, choices))}",
        )


def _kronecker_rows(seed: Seed, approximation: Approximation) -> tuple[Row, ...]:
    """Second moments of cotangents and of inputs."""
    cotangents = functools.partial(cotangent_gram, approximation=approximation)
    inputs = functools.partial(input_gram, approximation=approximation)
    return (Row(seed, cotangents), Row(INPUTS, inputs, degree=0))


def _factors(values: list[Any], samples: int) -> list[Tensor]:
    """``B`` as it is; ``A`` divided by the number of samples."""
    cotangents, inputs = values
    if inputs is None:
        return [cotangents]
    # the largest tensor here, which nobody else holds
    return [cotangents, inputs / samples if inputs.requires_grad else inputs.div_(samples)]


@dataclass(frozen=True, eq=False)
class KFAC(Sampled):
    """Kronecker factors of the GGN from sampled columns, ``kfac``: ``[B, A]`` or ``[B]``.

    The method is that of Martens and Grosse (2015) and, for convolutions, of Grosse and Martens (2016).
    See NOTE [Kronecker factors] for conventions and scales. Both factors are added up in at least float32 and
    rounded to the parameter's precision once.

    Args:
        mc_samples: Draws for each sample of the batch.
        subsampling: Indices of samples; B is their sum at the scale of the full batch, A their mean.
        generator: Makes the draws repeatable; the global random state is left alone then.
        approximation: What is done with weights that are shared over positions.
        fisher: ``"sampled"``: targets are drawn from the model. ``"empirical"``: those of the data are taken,
            one column at the scale of a draw (Kunstner et al. 2019 on what is lost); nothing is drawn then.
    """

    approximation: Approximation = "mixed"
    fisher: Fisher = "sampled"
    savefield = "kfac"

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        super().__post_init__()
        asked = f"KFAC(approximation={self.approximation!r}, fisher={self.fisher!r}) was asked for."
        _require_one_of(asked, "approximation", self.approximation, get_args(Approximation))
        _require_one_of(asked, "fisher", self.fisher, get_args(Fisher))

    @property
    def rows(self) -> tuple[Row, ...]:
        """Second moments of cotangents and of inputs."""
        seed = EMPIRICAL if self.fisher == "empirical" else self.seed
        return _kronecker_rows(seed, self.approximation)

    def finish(self, values: list[Any], samples: int) -> list[Tensor]:
        """``B`` as it is; ``A`` divided by the number of samples."""
        return _factors(values, samples)


@dataclass(frozen=True, eq=False)
class KFLR(Extension):
    """Kronecker factors of the GGN from every column of its root, ``kflr``: ``[B, A]`` or ``[B]``.

    What ``KFAC`` comes to for infinitely many draws, without their noise (Botev et al. 2017). See NOTE
    [Kronecker factors] for conventions and scales. Both factors are added up in at least float32 and rounded
    once.

    Args:
        subsampling: Indices of samples; B is their sum at the scale of the full batch, A their mean.
        approximation: What is done with weights that are shared over positions.
    """

    subsampling: Sequence[int] | None = None
    approximation: Approximation = "mixed"
    savefield = "kflr"

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        super().__post_init__()
        asked = f"KFLR(approximation={self.approximation!r}) was asked for."
        _require_one_of(asked, "approximation", self.approximation, get_args(Approximation))

    @property
    def rows(self) -> tuple[Row, ...]:
        """Second moments of cotangents and of inputs."""
        return _kronecker_rows(EXACT, self.approximation)

    def finish(self, values: list[Any], samples: int) -> list[Tensor]:
        """``B`` as it is; ``A`` divided by the number of samples."""
        return _factors(values, samples)


@dataclass(frozen=True, eq=False)
class KFRA(Extension):
    """Kronecker factors of the GGN by averaging over samples layer by layer, ``kfra``: ``[B, A]`` or ``[B]``.

    For chains of affine and elementwise layers, pooling and reshapes (Botev et al. 2017); see NOTE [Averaged
    recursion] (``packprop/recursion.py``). Other graphs are refused. Conventions and scales as for KFAC.
    """

    savefield = "kfra"

    @property
    def rows(self) -> tuple[Row, ...]:
        """The recursion, and second moments of inputs."""
        return _averaged_rows(EXACT, "ggn", False)

    def finish(self, values: list[Any], samples: int) -> list[Tensor]:
        """``B`` as it is; ``A`` divided by the number of samples."""
        return _factors(values, samples)


def _averaged_rows(seed: Seed, curvature: Curvature, average_jacobians: bool) -> tuple[Row, ...]:
    factors = functools.partial(
        averaged_factors, seed=seed, curvature=curvature, average_jacobians=average_jacobians
    )
    inputs: Any = input_sum if average_jacobians else input_gram
    return (Row(GRAPH, factors, whole=True), Row(INPUTS, inputs, degree=0))


@dataclass(frozen=True, eq=False)
class EKFAC(Sampled):
    """Kronecker factors of the GGN with corrected eigenvalues, ``ekfac``: a ``kronecker.Eigen``.

    The eigenvectors are those of ``B kron A``; the eigenvalues are what the block itself has on its diagonal in
    their basis: squares of per-sample gradients, rotated and summed over samples and columns. Of all matrices
    with these eigenvectors it is the one nearest to the block, and its trace is that of the block (George et
    al. 2018). ``values`` are ``[o, i]`` and carry the scale of the loss as reduced, ``vectors`` are
    ``[U_B, U_A]``; for a parameter that no input multiplies matrix-wise ``[p]`` and ``[U_B]``, the exact block.
    Squares are added up in at least float32 and everything is rounded once. Under ``create_graph=True``
    eigenvalues are differentiated with the eigenvectors held fixed.

    The columns are swept twice, the second time with the same draws, unless one sweep brings all of them: a
    single draw, the empirical Fisher, a small graph. See NOTE [Second pass] (``packprop/observe.py``).

    Args:
        mc_samples: Draws for each sample of the batch.
        subsampling: Indices of samples, at the scale of the full batch.
        generator: Makes the draws repeatable; the global random state is left alone then.
        approximation: Which factors the eigenvectors are taken of, where weights are shared over positions;
            eigenvalues are those of the block for each.
        fisher: ``"sampled"``: targets are drawn from the model. ``"empirical"``: those of the data are taken.
            ``"exact"``: every column of the root of the loss's Hessian; nothing is drawn for either.
    """

    approximation: Approximation = "mixed"
    fisher: Columns = "sampled"
    savefield = "ekfac"

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        super().__post_init__()
        asked = f"EKFAC(approximation={self.approximation!r}, fisher={self.fisher!r}) was asked for."
        _require_one_of(asked, "approximation", self.approximation, get_args(Approximation))
        _require_one_of(asked, "fisher", self.fisher, get_args(Columns))

    @property
    def rows(self) -> tuple[Row, ...]:
        """Factors, the order of entries, and squares in the eigenbasis of the factors."""
        seed = {"sampled": self.seed, "empirical": EMPIRICAL, "exact": EXACT}[self.fisher]
        order = Row(seed, entry_order_of, over_n=KEEP, over_v=KEEP, degree=0)
        return (*_kronecker_rows(seed, self.approximation), order, Row(seed, rotated_sum_sq, after=_rotations))

    def finish(self, values: list[Any], samples: int) -> Eigen:
        """Squares are the eigenvalues."""
        left, right, order, squares = values
        return Eigen(squares, [left] if right is None else [left, right], order)


def _rotations(values: list[Any]) -> list[Any]:
    """Eigenvectors in place of the factors."""
    cotangents, inputs, order = values
    return [eigenvectors(cotangents), None if inputs is None else eigenvectors(inputs), order]


LossHessian = Literal["exact", "sampling", "sum"]
Backprop = Literal["sqrt", "average"]
BOTEV_MARTENS, CHEN = "E[J^T E(H) J]", "E(J^T) E(H) E(J)"


@dataclass(frozen=True, eq=False)
class HBP(Extension):
    """Hessian backpropagation with its options, ``hbp``: ``[B, A]`` or ``[B]`` (Dangel et al. 2020).

    With ``backprop_strategy="sqrt"`` it is KFLR (``"exact"``) or KFAC (``"sampling"``) under another name; with
    ``"average"`` one matrix is averaged over samples layer by layer, as for KFRA, on the chains that this is
    defined on.

    Args:
        curv_type: ``"ggn"``, or with ``"average"`` also ``"hessian"``, ``"pch-abs"``, ``"pch-clip"``: whether
            elementwise nonlinearities add their curvature, and what is done with its sign.
        loss_hessian_strategy: ``"exact"`` columns or ``"sampling"``; ``"sum"``: exact, summed over samples.
        backprop_strategy: ``"sqrt"`` or ``"average"``.
        ea_strategy: ``"E[J^T E(H) J]"``; or ``"E(J^T) E(H) E(J)"``: Jacobians and inputs are averaged first.
        savefield: The attribute.
        generator: Makes draws repeatable.
    """

    curv_type: Curvature = "ggn"
    loss_hessian_strategy: LossHessian = "sum"
    backprop_strategy: Backprop = "average"
    ea_strategy: str = BOTEV_MARTENS
    savefield: str = "hbp"  # type: ignore[misc]  # a choice of each instance here
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        asked = f"HBP({self.curv_type!r}, {self.loss_hessian_strategy!r}, ...) was asked for."
        _require_one_of(asked, "curv_type", self.curv_type, get_args(Curvature))
        _require_one_of(asked, "loss_hessian_strategy", self.loss_hessian_strategy, get_args(LossHessian))
        _require_one_of(asked, "backprop_strategy", self.backprop_strategy, get_args(Backprop))
        _require_one_of(asked, "ea_strategy", self.ea_strategy, (BOTEV_MARTENS, CHEN))
        plain = self.curv_type == "ggn" and self.ea_strategy == BOTEV_MARTENS
        if self.backprop_strategy == "sqrt" and not plain:
            raise BadInput(
                asked,
                f"backprop_strategy='sqrt' with {self.curv_type!r} and {self.ea_strategy!r}",
                "columns of a root carry neither negative curvature nor averages",
                "choose backprop_strategy='average'",
            )

    @property
    def rows(self) -> tuple[Row, ...]:
        """Those of KFLR, of KFAC, or of the recursion."""
        drawn = self.loss_hessian_strategy == "sampling"
        seed = Seed("ggn", 1, self.generator) if drawn else EXACT
        if self.backprop_strategy == "sqrt":
            return _kronecker_rows(seed, "mixed")
        return _averaged_rows(seed, self.curv_type, self.ea_strategy == CHEN)

    def finish(self, values: list[Any], samples: int) -> list[Tensor]:
        """``B`` as it is; ``A`` from moments of the inputs."""
        if self.ea_strategy == CHEN and values[1] is not None:
            mean = values[1] / samples
            return [values[0], torch.outer(mean, mean)]
        return _factors(values, samples)
