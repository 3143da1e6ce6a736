"""Where a use finds its inputs if it does not hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from packprop.functions.building import changed_since
from packprop.functions.entry import Call, Cotangents, Entry, Samples, name_of
from packprop.functions.registry import entries_of
from packprop.tensors.nesting import map_tensors, tensors_in
from packprop.tensors.state import version


class Source(Protocol):
    """Where a use finds its inputs."""

    def ready(self) -> list[Entry] | None:
        """Entries with their inputs, if these are at hand."""

    def fetch(self) -> list[Entry]:
        """Entries with their inputs, at any price."""

    def taken(self) -> None:
        """The entries are in other hands."""

    def release(self) -> None:
        """There will be no other pass: let go of what the inputs are computed from."""


@dataclass(frozen=True)
class CallTemplate:
    """A call without its inputs.

    Args:
        function: What was called.
        parameters: Numbers of the parameters among the tensors that went in.
        shape: Shape of the (first) output.
        random_state: As for ``Call``.
        in_place: Whether the function changes its first argument.
    """

    function: Callable[..., Any]
    parameters: tuple[int, ...]
    shape: torch.Size
    random_state: Any
    in_place: bool

    @staticmethod
    def of(call: Call, in_place: bool) -> CallTemplate:
        """The recipe of a call."""
        tensors = list(tensors_in((call.args, call.kwargs)))
        numbers = [number for number, tensor in enumerate(tensors) if call.consumes(tensor)]
        return CallTemplate(call.function, tuple(numbers), call.shape, call.random_state, in_place)

    def entries(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        unexpanded: Callable[[Tensor], Tensor],
        attached: bool,
    ) -> list[Entry]:
        """Entries as they were when the call was recorded, from its inputs as they are found again."""
        tensors = list(tensors_in((args, kwargs)))
        parameters = tuple(tensors[number] for number in self.parameters)

        def bare(tensor: Tensor) -> Tensor:
            own = attached or any(tensor is parameter for parameter in parameters)
            return tensor if own else tensor.detach()

        if self.in_place:
            args = (args[0].clone(), *args[1:])
        args, kwargs = map_tensors(bare, (args, kwargs))
        return entries_of(
            Call(self.function, args, kwargs, parameters, self.shape, unexpanded, self.random_state)
        )


def without_inputs(entries: Iterable[Entry], source: Source) -> list[Entry]:
    """The same entries, which fetch their inputs each time that they meet a cotangent."""

    def built_by(number: int, name: str) -> Callable[..., Any]:
        def structure_of(cotangents: Cotangents, where: Any, samples: Samples) -> Any:
            return getattr(source.fetch()[number], name)(cotangents, where, samples)

        return structure_of

    return [
        replace(
            entry,
            structure_of=built_by(number, "structure_of"),
            squares=None if entry.squares is None else built_by(number, "squares"),
        )
        for number, entry in enumerate(entries)
    ]


class _Save(torch.autograd.Function):
    """Saves tensors in the graph as every function does: by the hooks that are in force."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return parameter.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # a node that nothing is made of
        return (None,) * len(ctx.needs_input_grad)


class OffloadedInputs:
    """Inputs that went through hooks of the user's, such as those of ``save_on_cpu``."""

    def __init__(self, call: Call, in_place: bool) -> None:
        self._recipe = replace(CallTemplate.of(call, in_place), in_place=False)  # a copy went in
        self._unexpanded = call.unexpanded
        nothing = torch.empty(0)
        tensors = [tensor for tensor in tensors_in((call.args, call.kwargs)) if not call.consumes(tensor)]
        self._form = map_tensors(
            lambda tensor: tensor if call.consumes(tensor) else nothing, (call.args, call.kwargs)
        )
        self._nothing = nothing
        self._saved = [(tensor.data_ptr(), version(tensor)) for tensor in tensors]
        self._node: Any = _Save.apply(call.parameters[0], *tensors).grad_fn  # type: ignore[no-untyped-call]

    def ready(self) -> list[Entry]:
        """Entries with what the hooks give back."""
        tensors = list(self._node.saved_tensors)
        for tensor, (place, before) in zip(tensors, self._saved, strict=True):
            if tensor.data_ptr() == place and version(tensor) != before:
                raise changed_since(name_of(self._recipe.function), tensor)
        left = iter(tensors)
        args, kwargs = map_tensors(lambda t: next(left) if t is self._nothing else t, self._form)
        return self._recipe.entries(args, kwargs, self._unexpanded, torch.is_grad_enabled())

    fetch = ready

    def taken(self) -> None:
        """Nothing is held here."""

    def release(self) -> None:
        """Let go of what the hooks made of the inputs."""
        self._node = None
