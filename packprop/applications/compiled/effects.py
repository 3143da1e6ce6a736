"""The effects of a pass besides its results: tensors that it writes to, generators that it draws from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from packprop.applications.compiled.aliases import is_operation, written_by
from packprop.applications.compiled.reads import Calls, ReadsValue, values_read
from packprop.engine.tensors import not_traceable, random_states, set_random_states, storage_of, tensors_in


@dataclass(frozen=True)
class Effects:
    """The effects of a graph, which are those of the pass that it was traced from.

    Args:
        inputs: The places of the inputs that it writes to.
        others: Other tensors that it writes to: attributes of modules, variables of a loss function.
        generators: The generators that it draws from, other than PyTorch's default generators.
        draws: Says that it draws from PyTorch's default generators.
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
        random: The states of PyTorch's default generators.
    """

    tensors: list[tuple[Tensor, Tensor]]
    generators: list[tuple[torch.Generator, Tensor]]
    random: dict[torch.device, Tensor]

    def put_back(self) -> None:
        """Restore all values and states."""
        for tensor, value in reversed(self.tensors):  # of several copies of a tensor, the first one counts
            tensor.data.copy_(value)
        for generator, state in self.generators:
            generator.set_state(state)
        set_random_states(self.random)

    def draws_like(self, other: Kept) -> bool:
        """Tell whether the states of all generators are equal."""
        own, its = ([*each.random.values(), *(state for _, state in each.generators)] for each in (self, other))
        return all(map(torch.equal, own, its))


SETS_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]  # it is an attribute of C++
"""The function that an assignment to ``.data`` calls."""


class Watch:
    """Notes the effects of a pass while it is traced, and undoes them.

    Args:
        inputs: The inputs of the graph. Their values, and those computed from them, are new in each replay.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._inputs = inputs
        self._new = _storages(inputs)
        self._made: set[int] = set()
        self._outside: set[int] = set()
        """Memory of what was computed from tensors that existed before the pass and are no inputs."""
        self._written: set[int] = set()
        self._draws = False
        self._before = Kept([], [], {})
        self.unsized: str | None = None
        """The first operation whose result has a size that depends on values."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the pass that runs inside."""
        with Calls(self.require_replayable), _Operations(self.note):
            yield

    def undo(self) -> None:
        """Restore the values of tensors and generators that existed before the pass."""
        self._before.put_back()

    def effects(self, constants: Sequence[Tensor]) -> Effects:
        """Return the effects on the inputs of a graph, and on the tensors that it holds."""
        places = [place for place, tensor in enumerate(self._inputs) if storage_of(tensor) in self._written]
        others = [tensor for tensor in constants if storage_of(tensor) in self._written]
        return Effects(places, others, [each for each, _ in self._before.generators], self._draws)

    def require_replayable(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a call that no replay repeats.

        Raises:
            ReadsValue: If it reads values which are new in each replay.
            NotTraceable: If it assigns other memory to a tensor from before the pass, or reads values of such a
                tensor that is no input: they may change in place.
        """
        if function == SETS_DATA and not self._made.issuperset(_storages(args[:1])):
            raise not_traceable("an assignment to .data", "a graph cannot give a tensor other memory")
        read = _storages(values_read(function, args, kwargs))
        if not self._new.isdisjoint(read):
            raise ReadsValue(f"{function} was called")
        if not self._outside.isdisjoint(read) or not self._made.issuperset(read):
            why = "it reads values of a tensor outside of model and batch, and these values may change"
            raise not_traceable(getattr(function, "__name__", str(function)), why)

    def note(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and note its effects.

        Raises:
            NotTraceable: If it exchanges tensors between processes, not all of which may be tracing, or changes
                the shape of a tensor from before the pass.
        """
        if "c10d" in operation.namespace:
            raise not_traceable(
                str(operation), "it exchanges tensors between processes, which a graph does not wait for"
            )
        if self.unsized is None and _size_depends_on_values(operation, args):
            self.unsized = str(operation)
        draws = torch.Tag.nondeterministic_seeded in operation.tags
        self._draws = self._draws or draws
        given, written = _storages(tensors_in((args, kwargs))), [*written_by(operation, args, kwargs)]
        self._keep(operation, [tensor for tensor in written if _storages([tensor]) - self._made])
        for each in (*args, *kwargs.values()):
            if isinstance(each, torch.Generator) and each not in dict(self._before.generators):
                self._before.generators.append((each, each.get_state()))
        out = operation(*args, **kwargs)
        found = _storages(tensors_in(out))
        is_literal = operation is torch.ops.aten.lift_fresh.default
        fresh = found if is_literal else found - given
        if not is_literal and (given - self._made - self._new or not self._outside.isdisjoint(given)):
            self._outside |= found | _storages(written)
        else:
            self._outside -= fresh
        self._made |= fresh
        if draws or not self._new.isdisjoint(given):
            self._new |= found | _storages(written)
        else:
            self._new -= fresh  # such memory was another tensor's before
        return out

    def _keep(self, operation: Any, tensors: Sequence[Tensor]) -> None:
        """Copy tensors from before the pass that an operation will write to."""
        if tensors and torch.Tag.inplace_view in operation.tags:
            raise not_traceable(str(operation), "it gives a tensor of the model another shape or other memory")
        self._written |= _storages(tensors)
        self._before.tensors.extend((tensor, tensor.detach().clone()) for tensor in tensors)


def _size_depends_on_values(operation: Any, args: tuple[Any, ...]) -> bool:
    """Tell whether the result of an operation may have another size for other values."""
    if operation is torch.ops.aten.index.Tensor:
        return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    return torch.Tag.dynamic_output_shape in operation.tags


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses at which the memory of tensors begins, as far as they are known."""
    return {storage_of(tensor) for tensor in tensors} - {0}


class _Operations(TorchDispatchMode):
    """Sees operations below autograd, before the tracer does."""

    def __init__(self, note: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._note(func, args, kwargs) if is_operation(func) else func(*args, **kwargs)
