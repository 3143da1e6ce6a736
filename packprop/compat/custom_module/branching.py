"""Branches of a network, and their sum, as modules."""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from packprop.errors import BadInput


class Branch(nn.Module):
    """Passes one input through several modules, side by side.

    Args:
        modules: The modules, or one ordered dictionary of them, as for ``torch.nn.Sequential``.
    """

    def __init__(self, *modules: Any) -> None:
        super().__init__()
        named = modules[0] if len(modules) == 1 and isinstance(modules[0], OrderedDict) else None
        items = named.items() if named is not None else ((str(i), m) for i, m in enumerate(modules))
        for name, module in items:
            self.add_module(name, module)

    def forward(self, input: Any) -> tuple[Any, ...]:
        """Return the output of each module."""
        return tuple(module(input) for module in self.children())


class SumModule(nn.Module):
    """Adds up its inputs."""

    def forward(self, *input: Tensor) -> Tensor:
        """Add up tensors of equal shape.

        Raises:
            BadInput: If there are no inputs, one of them is no tensor, or their shapes differ.
        """
        shapes = [list(tensor.shape) for tensor in input if isinstance(tensor, Tensor)]
        if not input or len(shapes) < len(input) or any(shape != shapes[0] for shape in shapes):
            raise BadInput(
                "SumModule was called.",
                f"inputs {shapes if len(shapes) == len(input) else [type(given).__name__ for given in input]}",
                "it adds tensors of equal shape",
                "bring all branches to one shape first",
            )
        return functools.reduce(operator.add, input)


class Parallel(nn.Module):
    """Passes one input through several modules, side by side, and merges their outputs.

    Args:
        modules: As for ``Branch``.
        merge_module: Takes the outputs as its arguments; ``None`` for their sum.
    """

    def __init__(self, *modules: Any, merge_module: nn.Module | None = None) -> None:
        super().__init__()
        self.branch = Branch(*modules)
        self.merge = SumModule() if merge_module is None else merge_module

    def forward(self, input: Any) -> Any:
        """Return the merged outputs."""
        return self.merge(*self.branch(input))
