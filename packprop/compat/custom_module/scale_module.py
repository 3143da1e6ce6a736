"""Multiplication by a constant as a module."""

from __future__ import annotations

from torch import Tensor, nn

from packprop.errors import BadInput


class ScaleModule(nn.Module):
    """``x * weight`` with a constant that is not trained.

    Args:
        weight: The constant.

    Raises:
        BadInput: If ``weight`` is no number; a ``ValueError``.
    """

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise BadInput(
                "ScaleModule(weight) was called.",
                f"weight of type {type(weight).__name__}",
                "the module multiplies by a constant",
                "give a number; for a trained factor write a module with a parameter",
            )
        self.weight = float(weight)

    def forward(self, input: Tensor) -> Tensor:
        """Return the scaled tensor, of the same shape."""
        return input * self.weight

    def extra_repr(self) -> str:
        """Return the constant."""
        return str(self.weight)
