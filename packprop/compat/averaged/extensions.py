"""Kronecker factors from curvature that is averaged over samples layer by layer: KFRA and HBP.

See NOTE [Kronecker factors] (``packprop/extensions/kronecker.py``) for conventions and scales, and
NOTE [Averaged recursion] (``recursion.py``) for the averages.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from packprop.compat.averaged.recursion import Curvature, averaged_factors
from packprop.engine.algebra import input_gram, input_sum, mean_product
from packprop.errors import BadInput
from packprop.extensions.arguments import Otherwise, require_one_of, require_otherwise
from packprop.extensions.kronecker import Factors, factor_rows
from packprop.types import EXACT, GRAPH, INPUTS, Row, Seed

LossHessian = Literal["exact", "sampling", "sum"]
Backprop = Literal["sqrt", "average"]
BOTEV_MARTENS, CHEN = "E[J^T E(H) J]", "E(J^T) E(H) E(J)"


@dataclass(frozen=True, eq=False)
class KFRA(Factors):
    """Kronecker factors of the GGN, averaged over samples layer by layer, ``kfra``: ``[B, A]`` or ``[B]``.

    The factors exist for chains of affine and elementwise layers, pooling and reshapes (Botev et al. 2017);
    packprop refuses other graphs. Conventions and scales are those of KFAC. packprop sums both factors in at
    least float32, and keeps this precision.

    Args:
        otherwise: As for ``KFAC``, but for input factors alone: the recursion needs the whole ``B``.
    """

    otherwise: Otherwise | None = None
    savefield = "kfra"

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        asked = f"KFRA(otherwise={self.otherwise!r}) was asked for."
        require_otherwise(asked, self.otherwise)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of the recursion, and of second moments of inputs."""
        return _averaged_rows(EXACT, "ggn", False, self.otherwise)


@dataclass(frozen=True, eq=False)
class HBP(Factors):
    """Hessian backpropagation with its options, ``hbp``: ``[B, A]`` or ``[B]`` (Dangel et al. 2020).

    With ``backprop_strategy="sqrt"`` it is KFLR (``"exact"``) or KFAC (``"sampling"``) under another name. With
    ``"average"`` it averages one matrix over samples layer by layer, as KFRA does, and on the same graphs.
    packprop sums both factors in at least float32, and keeps this precision.

    Args:
        curv_type: ``"ggn"``, or with ``"average"`` also ``"hessian"``, ``"pch-abs"``, ``"pch-clip"``: these add
            the curvature of elementwise nonlinearities, and differ in the treatment of negative curvature.
        loss_hessian_strategy: ``"exact"`` columns or ``"sampling"``; ``"sum"``: exact, summed over samples.
        backprop_strategy: ``"sqrt"`` or ``"average"``.
        ea_strategy: ``"E[J^T E(H) J]"``; or ``"E(J^T) E(H) E(J)"``, which averages Jacobians and inputs first.
        savefield: The attribute that the value is saved in.
        generator: Makes draws repeatable.
        otherwise: As for ``KFAC``; with ``"average"`` for input factors alone, because the recursion needs the
            whole ``B``.
    """

    curv_type: Curvature = "ggn"
    loss_hessian_strategy: LossHessian = "sum"
    backprop_strategy: Backprop = "average"
    ea_strategy: str = BOTEV_MARTENS
    savefield: str = "hbp"  # type: ignore[misc]  # a choice of each instance here
    generator: torch.Generator | None = None
    otherwise: Otherwise | None = None

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        asked = f"HBP({self.curv_type!r}, {self.loss_hessian_strategy!r}, ...) was asked for."
        require_one_of(asked, "curv_type", self.curv_type, get_args(Curvature))
        require_one_of(asked, "loss_hessian_strategy", self.loss_hessian_strategy, get_args(LossHessian))
        require_one_of(asked, "backprop_strategy", self.backprop_strategy, get_args(Backprop))
        require_one_of(asked, "ea_strategy", self.ea_strategy, (BOTEV_MARTENS, CHEN))
        require_otherwise(asked, self.otherwise)
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
        """The rows of KFLR, of KFAC, or of the recursion."""
        drawn = self.loss_hessian_strategy == "sampling"
        seed = Seed("ggn", 1, self.generator) if drawn else EXACT
        if self.backprop_strategy == "sqrt":
            return factor_rows(seed, "mixed", self.otherwise)
        return _averaged_rows(seed, self.curv_type, self.ea_strategy == CHEN, self.otherwise)

    def finish(self, values: list[Any], samples: int) -> list[Tensor] | None:
        """Return ``B``, and ``A`` from moments of the inputs."""
        cotangents, inputs = values
        if self.ea_strategy == CHEN and inputs is not None and inputs.numel():
            return [cotangents, mean_product(inputs, samples)]
        return super().finish(values, samples)


def _averaged_rows(
    seed: Seed, curvature: Curvature, average_jacobians: bool, otherwise: Otherwise | None
) -> tuple[Row, ...]:
    """Return the rows of both factors: the recursion, and moments of inputs."""
    factors = functools.partial(
        averaged_factors, seed=seed, curvature=curvature, average_jacobians=average_jacobians
    )
    inputs = functools.partial(
        input_sum if average_jacobians else input_gram, otherwise=otherwise or "diagonal"
    )
    return (Row(GRAPH, factors, whole=True), Row(INPUTS, inputs, degree=0))
