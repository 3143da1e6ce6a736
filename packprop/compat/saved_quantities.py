"""The quantities that an extension for single modules propagates back, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class SavedQuantities:
    """The quantities that an extension propagates back, by the tensor at which they arrive.

    Args:
        columns: Columns of the cotangent by tensor, if packprop has propagated them. The extension then
            propagates nothing itself.
    """

    def __init__(self, columns: dict[Any, Tensor] | None = None) -> None:
        self._values: dict[Any, Any] = dict(columns or {})
        self.are_given = columns is not None

    def save_quantity(self, key: Any, quantity: Any, accumulation_function: Callable[[Any, Any], Any]) -> None:
        """Save a quantity; if there is one at this tensor, save the two accumulated."""
        if key in self._values:
            quantity = accumulation_function(self._values[key], quantity)
        self._values[key] = quantity

    def retrieve_quantity(self, key: Any, delete_old: bool) -> Any:
        """Return the quantity saved at a tensor; ``None`` if there is none."""
        return self._values.pop(key, None) if delete_old else self._values.get(key)
