"""The effects of a pass beside its results: tensors that it writes to, generators that it draws from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from packprop.applications.compiled.aliases import is_operation, written_by
from packprop.engine.tensors import not_traceable, random_states, set_random_states, storage_of


@dataclass(frozen=True)
class Effects:
    """The effects of a graph, which are those of the pass that it was traced from.

    Args:
        inputs: The places of the inputs that it writes to.
        others: Other tensors that it writes to: attributes of modules, variables of a loss function.
        generators: The generators that it draws from, other than PyTorch's own.
        draws: Says that it draws from PyTorch's own.
    """

    inputs: Sequence[int]
    others: Sequence[Tensor]
    generators: Sequence[torch.Generator]
    draws: bool

    def kept(self, tensors: Sequence[Tensor]) -> Kept:
        """Copy what the graph changes, given its inputs."""
        written = [*(tensors[place] for place in self.inputs), *self.others]
        return Kept(
            [(tensor, tensor.detach().clone()) for tensor in written],
            [(generator, generator.get_state()) for generator in self.generators],
            random_states() if self.draws else {},
        )


@dataclass(frozen=True)
class Kept:
    """Copies of what a graph changes.

    Args:
        tensors: Tensors with their values.
        generators: Generators with their states.
        random: The states of PyTorch's own.
    """

    tensors: list[tuple[Tensor, Tensor]]
    generators: list[tuple[torch.Generator, Tensor]]
    random: dict[torch.device, Tensor]

    def put_back(self) -> None:
        """Give everything its value back."""
        for tensor, value in self.tensors:
            tensor.data.copy_(value)
        for generator, state in self.generators:
            generator.set_state(state)
        set_random_states(self.random)


class Watch:
    """Notes the effects of a pass while it is traced."""

    def __init__(self) -> None:
        self._written: set[int] = set()
        self._generators: dict[int, torch.Generator] = {}
        self._draws = False

    def watching(self) -> _Operations:
        """Return a context; the pass runs inside."""
        return _Operations(self.note)

    def effects(self, inputs: Sequence[Tensor], constants: Sequence[Tensor]) -> Effects:
        """Return the effects on the inputs of a graph, and on the tensors that it holds."""
        places = [place for place, tensor in enumerate(inputs) if storage_of(tensor) in self._written]
        others = [tensor for tensor in constants if storage_of(tensor) in self._written]
        return Effects(places, others, [*self._generators.values()], self._draws)

    def note(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and note its effects.

        Raises:
            NotTraceable: If it exchanges tensors between processes. Not all of them may be tracing.
        """
        if "c10d" in operation.namespace:
            raise not_traceable(
                str(operation), "it exchanges tensors between processes, which a graph does not wait for"
            )
        self._draws = self._draws or torch.Tag.nondeterministic_seeded in operation.tags
        for generator in (*args, *kwargs.values()):
            if isinstance(generator, torch.Generator):
                self._generators.setdefault(id(generator), generator)
        self._written |= {storage_of(tensor) for tensor in written_by(operation, args, kwargs)} - {0}
        return operation(*args, **kwargs)


class _Operations(TorchDispatchMode):
    """Sees operations below autograd, before the tracer does."""

    def __init__(self, note: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._note(func, args, kwargs) if is_operation(func) else func(*args, **kwargs)
