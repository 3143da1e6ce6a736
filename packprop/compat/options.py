"""Names of options, as BackPACK spells them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

from torch import Tensor

from packprop.engine.algebra import algorithms
from packprop.engine.tensors import at_least


class LossHessianStrategy:
    """The representation of the Hessian of the loss in the model's output."""

    EXACT, SAMPLING, SUM = "exact", "sampling", "sum"
    CHOICES: ClassVar[list[str]] = [EXACT, SAMPLING, SUM]


class BackpropStrategy:
    """The propagated quantity: a root of each sample's matrix, or the average matrix."""

    SQRT, BATCH_AVERAGE = "sqrt", "average"
    CHOICES: ClassVar[list[str]] = [BATCH_AVERAGE, SQRT]


class ExpectationApproximation:
    """The means over samples: one of the whole product, or one of each of its factors."""

    BOTEV_MARTENS, CHEN = "E[J^T E(H) J]", "E(J^T) E(H) E(J)"
    CHOICES: ClassVar[list[str]] = [BOTEV_MARTENS, CHEN]


class ResidualModifications:
    """The treatment of the second derivatives of a layer."""

    @staticmethod
    def nothing(res: Tensor) -> Tensor:
        """Return second derivatives as they are."""
        return res

    @staticmethod
    def to_zero(res: Tensor) -> None:
        """Return nothing: leave second derivatives out."""

    @staticmethod
    def remove_negative_values(res: Tensor) -> Tensor:
        """Set negative second derivatives to zero."""
        return at_least(res, 0.0)

    @staticmethod
    def to_abs(res: Tensor) -> Tensor:
        """Return absolute values."""
        return res.abs()


class Curvature:
    """The curvature matrix: the Hessian, the GGN, or a Hessian with residuals made positive."""

    HESSIAN, GGN, PCH_ABS, PCH_CLIP = "hessian", "ggn", "pch-abs", "pch-clip"
    CHOICES: ClassVar[list[str]] = [HESSIAN, GGN, PCH_CLIP, PCH_ABS]


class weight_jac_t_save_memory:  # noqa: N801  # the older library's name
    """BackPACK's name for ``packprop.algorithms(convolutions="groups")``, or for packprop's own choice.

    packprop bounds temporary memory either way, and values are equal.

    Args:
        save_memory: Do not unfold inputs of convolutions; if false, a context around it or packprop chooses.
    """

    _SAVE_MEMORY = False

    def __init__(self, save_memory: bool = True) -> None:
        self._chosen = save_memory
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        kind, stack = weight_jac_t_save_memory, ExitStack()
        self._entered.append(stack)
        stack.callback(setattr, kind, "_SAVE_MEMORY", kind._SAVE_MEMORY)
        kind._SAVE_MEMORY = self._chosen
        if self._chosen:
            stack.enter_context(algorithms(convolutions="groups"))

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().close()

    @staticmethod
    def is_saving() -> bool:
        """Return ``save_memory`` of the innermost context; false outside of contexts."""
        return weight_jac_t_save_memory._SAVE_MEMORY
