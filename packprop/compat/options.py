"""Names of options, as BackPACK spells them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

from torch import Tensor

from packprop.engine.algebra import algorithms
from packprop.engine.tensors import at_least
from packprop.errors import BadInput


class UnknownChoice(BadInput, AttributeError):
    """Raised for an option that has none of the names; an ``AttributeError``, as in BackPACK."""


class _Choice:
    """Names to choose from."""

    CHOICES: ClassVar[list[str]]

    @classmethod
    def check_exists(cls, strategy: Any) -> None:
        """Refuse anything but the names.

        Raises:
            UnknownChoice: An ``AttributeError``, and a ``ValueError``.
        """
        if strategy not in cls.CHOICES:
            raise UnknownChoice(
                f"{cls.__name__} {strategy!r} was asked for.",
                cls.__name__,
                "it is not one of those that are known",
                f"choose from {', '.join(map(repr, cls.CHOICES))}",
            )


class LossHessianStrategy(_Choice):
    """The representation of the Hessian of the loss in the model's output."""

    EXACT, SAMPLING, SUM = "exact", "sampling", "sum"
    CHOICES: ClassVar[list[str]] = [EXACT, SAMPLING, SUM]


class BackpropStrategy(_Choice):
    """The propagated quantity: a root of each sample's matrix, or the average matrix."""

    SQRT, BATCH_AVERAGE = "sqrt", "average"
    CHOICES: ClassVar[list[str]] = [BATCH_AVERAGE, SQRT]

    @classmethod
    def is_batch_average(cls, strategy: str) -> bool:
        """Tell whether the average matrix is propagated."""
        cls.check_exists(strategy)
        return strategy == cls.BATCH_AVERAGE

    @classmethod
    def is_sqrt(cls, strategy: str) -> bool:
        """Tell whether roots are propagated."""
        cls.check_exists(strategy)
        return strategy == cls.SQRT


class ExpectationApproximation(_Choice):
    """The place of means over samples."""

    BOTEV_MARTENS, CHEN = "E[J^T E(H) J]", "E(J^T) E(H) E(J)"
    CHOICES: ClassVar[list[str]] = [BOTEV_MARTENS, CHEN]

    @classmethod
    def should_average_param_jac(cls, strategy: str) -> bool:
        """Tell whether Jacobians in the parameters are also averaged."""
        cls.check_exists(strategy)
        return strategy == cls.CHEN


class ResidualModifications:
    """The treatment of the second derivatives of a layer."""

    @staticmethod
    def nothing(res: Tensor) -> Tensor:
        """Keep them."""
        return res

    @staticmethod
    def to_zero(res: Tensor) -> None:
        """Drop them."""

    @staticmethod
    def remove_negative_values(res: Tensor) -> Tensor:
        """Set negative ones to zero."""
        return at_least(res, 0.0)

    @staticmethod
    def to_abs(res: Tensor) -> Tensor:
        """Drop their signs."""
        return res.abs()


class Curvature(_Choice):
    """The matrix: the Hessian, the GGN, or a Hessian with residuals made positive."""

    HESSIAN, GGN, PCH_ABS, PCH_CLIP = "hessian", "ggn", "pch-abs", "pch-clip"
    CHOICES: ClassVar[list[str]] = [HESSIAN, GGN, PCH_CLIP, PCH_ABS]
    REQUIRE_PSD_LOSS_HESSIAN: ClassVar[dict[str, bool]] = {
        HESSIAN: False,
        GGN: True,
        PCH_ABS: True,
        PCH_CLIP: True,
    }
    REQUIRE_RESIDUAL: ClassVar[dict[str, bool]] = {HESSIAN: True, GGN: False, PCH_ABS: True, PCH_CLIP: True}
    RESIDUAL_MODS: ClassVar[dict[str, Any]] = {
        HESSIAN: ResidualModifications.nothing,
        GGN: ResidualModifications.to_zero,
        PCH_ABS: ResidualModifications.to_abs,
        PCH_CLIP: ResidualModifications.remove_negative_values,
    }

    @classmethod
    def require_residual(cls, curv_type: str) -> bool:
        """Tell whether second derivatives of layers enter."""
        cls.check_exists(curv_type)
        return cls.REQUIRE_RESIDUAL[curv_type]

    @classmethod
    def is_pch(cls, curv_type: str) -> bool:
        """Tell whether residuals are made positive (Chen et al. 2018)."""
        cls.check_exists(curv_type)
        return curv_type in (cls.PCH_ABS, cls.PCH_CLIP)

    @classmethod
    def modify_residual(cls, residual: Tensor | None, curv_type: str) -> Tensor | None:
        """Return the second derivatives of a layer, as they enter this matrix."""
        if residual is None:
            return None
        cls.check_exists(curv_type)
        modified: Tensor | None = cls.RESIDUAL_MODS[curv_type](residual)
        return modified

    @classmethod
    def check_loss_hessian(cls, loss_hessian_is_psd: bool, curv_type: str) -> None:
        """Refuse a loss that is not convex in the model's output if that is needed.

        Raises:
            BadInput: A ``ValueError``.
        """
        cls.check_exists(curv_type)
        if cls.REQUIRE_PSD_LOSS_HESSIAN[curv_type] and not loss_hessian_is_psd:
            raise BadInput(
                f"The curvature {curv_type!r} was asked for.",
                "the loss",
                "its Hessian in the model's output is not positive semi-definite",
                f"use a loss that is convex in the model's output, or {cls.HESSIAN!r}",
            )


class weight_jac_t_save_memory:  # noqa: N801  # the older library's name
    """The older name of ``packprop.algorithms(convolutions="groups")``, or of packprop's own choice.

    packprop bounds temporary memory either way, and values are equal.

    Args:
        save_memory: Do not unfold inputs of convolutions.
    """

    _SAVE_MEMORY = False

    def __init__(self, save_memory: bool = True) -> None:
        self._chosen, self._stack = save_memory, ExitStack()

    def __enter__(self) -> None:
        kind = weight_jac_t_save_memory
        self._stack.callback(setattr, kind, "_SAVE_MEMORY", kind._SAVE_MEMORY)
        kind._SAVE_MEMORY = self._chosen
        if self._chosen:
            self._stack.enter_context(algorithms(convolutions="groups"))

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @staticmethod
    def is_saving() -> bool:
        """Return the last choice."""
        return weight_jac_t_save_memory._SAVE_MEMORY
