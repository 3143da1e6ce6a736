"""Inputs that a use does not hold: what provides them, and how entries are made from them again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from packprop.functions.building import changed_since
from packprop.functions.entry import Call, Cotangents, Entry, Samples, Taken, name_of
from packprop.functions.registry import entries_of
from packprop.tensors.nesting import map_tensors, tensors_in
from packprop.tensors.state import version


class InputSource(Protocol):
    """Where a use finds its inputs if it does not hold them."""

    def ready(self) -> list[Entry] | None:
        """Entries with their inputs, if these are at hand."""

    def fetch(self) -> list[Entry]:
        """Entries with their inputs, even if these must be computed again."""

    def taken(self) -> None:
        """The caller has taken the entries: do not keep them any longer."""

    def release(self) -> None:
        """There will be no other pass: drop what the inputs are computed from."""


@dataclass(frozen=True)
class CallTemplate:
    """A call without its inputs.

    Args:
        function: What was called.
        parameters: Which of the tensors that went in are parameters, by number.
        shape: Shape of the (first) output.
        random_state: As in ``Call``.
        in_place: Whether the function changes its first argument.
    """

    function: Callable[..., Any]
    parameters: tuple[int, ...]
    shape: torch.Size
    random_state: Any
    in_place: bool

    @staticmethod
    def of(call: Call, in_place: bool) -> CallTemplate:
        """The template of a call."""
        tensors = list(tensors_in((call.args, call.kwargs)))
        numbers = [number for number, tensor in enumerate(tensors) if call.consumes(tensor)]
        return CallTemplate(call.function, tuple(numbers), call.shape, call.random_state, in_place)

    def entries(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        unexpanded: Callable[[Tensor], Tensor],
        differentiable: bool,
        taken: tuple[Taken, ...] | None = None,
    ) -> list[Entry]:
        """Entries as they were when the call was recorded, from its arguments, which are given again.

        ``differentiable``: whether the inputs stay attached to the graph that made them. ``taken``: those that
        are the same tensors as then, as they were.
        """
        tensors = list(tensors_in((args, kwargs)))
        parameters = tuple(tensors[number] for number in self.parameters)

        def detach_input(tensor: Tensor) -> Tensor:
            attached = differentiable or any(tensor is parameter for parameter in parameters)
            return tensor if attached else tensor.detach()

        if self.in_place:
            args = (args[0].clone(), *args[1:])
        args, kwargs = map_tensors(detach_input, (args, kwargs))
        return entries_of(
            Call(self.function, args, kwargs, parameters, self.shape, unexpanded, self.random_state, taken)
        )


def without_inputs(entries: Iterable[Entry], source: InputSource) -> list[Entry]:
    """The same entries, which fetch their inputs each time that a structure is built."""

    def fetching(number: int, name: str) -> Callable[..., Any]:
        def structure_of(cotangents: Cotangents, layouts: Any, samples: Samples) -> Any:
            return getattr(source.fetch()[number], name)(cotangents, layouts, samples)

        return structure_of

    return [
        replace(
            entry,
            structure_of=fetching(number, "structure_of"),
            squares=None if entry.squares is None else fetching(number, "squares"),
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
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # never run: nothing is computed from the node's output
        return (None,) * len(ctx.needs_input_grad)


class OffloadedInputs:
    """Inputs that went through the user's hooks on saved tensors, such as those of ``save_on_cpu``."""

    def __init__(self, call: Call, in_place: bool) -> None:
        # an input that the function overwrites was copied before
        self._template = replace(CallTemplate.of(call, in_place), in_place=False)
        self._unexpanded = call.unexpanded
        self._parameters = tuple(map(Taken.of, call.parameters))
        arguments = (call.args, call.kwargs)
        tensors = [tensor for tensor in tensors_in(arguments) if not call.consumes(tensor)]
        self._placeholder = placeholder = torch.empty(0)
        self._arguments = map_tensors(
            lambda tensor: tensor if call.consumes(tensor) else placeholder, arguments
        )
        self._saved = [(tensor.data_ptr(), version(tensor)) for tensor in tensors]
        # the output is kept, not its node: up to PyTorch 2.10 a node of Python's does not outlive its output
        self._output: Tensor | None = _Save.apply(call.parameters[0], *tensors)  # type: ignore[no-untyped-call]  # torch's own

    def ready(self) -> list[Entry]:
        """Entries with what the hooks give back."""
        assert self._output is not None
        node: Any = self._output.grad_fn
        tensors = list(node.saved_tensors)
        for tensor, (address, before) in zip(tensors, self._saved, strict=True):
            if tensor.data_ptr() == address and version(tensor) != before:
                raise changed_since(name_of(self._template.function), tensor)
        remaining = iter(tensors)
        args, kwargs = map_tensors(
            lambda tensor: next(remaining) if tensor is self._placeholder else tensor, self._arguments
        )
        return self._template.entries(args, kwargs, self._unexpanded, torch.is_grad_enabled(), self._parameters)

    fetch = ready

    def taken(self) -> None:
        """Nothing is held here."""

    def release(self) -> None:
        """Drop what the hooks made of the inputs."""
        self._output = None
