"""A call of a function that is checked, taken apart into samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from packprop.errors import BadInput
from packprop.functions.entry import Call, Entry, name_of
from packprop.functions.registry import RULES
from packprop.tensors.layout import Layout
from packprop.tensors.nesting import map_tensors, tensors_in
from packprop.testing.loops import (
    differentiable,
    fixed_random_state,
    places,
)
from packprop.testing.report import Ledger

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


Make = Callable[[int], Any]


@dataclass
class Example:
    """Arguments of a function for some samples.

    Args:
        function: The function.
        tensors: All tensors among the arguments, parameters included, in order.
        names: What each of them is called.
        axes: Where each of them holds the samples; ``None`` if it does not.
        build: Positional and keyword arguments with other tensors in these places.
        samples: How many samples there are.
        places: Where the outputs hold the samples.
    """

    function: Callable[..., Any]
    tensors: list[Tensor]
    names: list[str]
    axes: list[int | None]
    build: Callable[[Sequence[Tensor]], Arguments]
    samples: int
    places: list[Layout] = field(default_factory=list)

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """The trainable tensors among the arguments, by name."""
        pairs = zip(self.names, self.tensors, strict=True)
        found = {id(tensor): (name, tensor) for name, tensor in pairs if tensor.requires_grad}
        return dict(found.values())

    @cached_property
    def call(self) -> Call:
        """One call, as recording describes it to rules."""
        args, kwargs = self.build(self.tensors)
        parameters = tuple(self.parameters.values())
        shape = self.outputs()[0].shape
        return Call(self.function, args, kwargs, parameters, shape, lambda tensor: tensor)

    @cached_property
    def described(self) -> dict[str, Entry]:
        """What the registered rule says of each parameter."""
        rule, call = RULES.get(self.function), self.call
        entries = list(rule(call, *call.args, **call.kwargs) or ()) if rule else []
        return {
            name: entry
            for entry in entries
            for name, parameter in self.parameters.items()
            if entry.parameter is parameter
        }

    def outputs(self, tensors: Sequence[Tensor] | None = None) -> list[Tensor]:
        """What the function returns, as far as it requires a gradient."""
        args, kwargs = self.build(self.tensors if tensors is None else tensors)
        return differentiable(self.function(*args, **kwargs))

    def some(self, first: int, count: int = 1, step: int = 1) -> list[Tensor]:
        """The tensors with some samples only."""
        index = torch.arange(first, first + count * step, step)
        return [
            tensor if axis is None else tensor.index_select(axis, index.to(tensor.device))
            for tensor, axis in zip(self.tensors, self.axes, strict=True)
        ]


def make_example(
    ledger: Ledger,
    function: Callable[..., Any],
    make: Make,
    samples: int,
    like: Example | None = None,
) -> Example:
    """Arguments for some samples; with the parameters of another example, if one is given."""
    with fixed_random_state(seed=0 if like is None else 1):
        made, more = (_split(make(count)) for count in (samples, samples + 1))
    found, grown = list(tensors_in(made)), list(tensors_in(more))
    if len(found) != len(grown):
        raise _bad(function, "the number of tensors depends on the number of samples")
    names = _names(function, *made)
    tensors: list[Tensor] = []
    axes: list[int | None] = []
    kept: dict[int, Tensor] = {}
    for place, (tensor, other) in enumerate(zip(found, grown, strict=True)):
        wide = tensor.detach().double() if tensor.is_floating_point() else tensor
        if tensor.requires_grad:
            new = nn.Parameter(wide.clone()) if like is None else like.tensors[place]
            tensors.append(kept.setdefault(id(tensor), new))
            axes.append(None)
            continue
        tensors.append(wide)
        pairs = list(zip(tensor.shape, other.shape, strict=False))
        changed = [a for a, pair in enumerate(pairs) if pair == (samples, samples + 1)]
        if len(changed) > 1 or tensor.dim() != other.dim():
            raise _bad(function, f"{names[place]} holds samples on several axes")
        axes.append(changed[0] if changed else None)
    if all(axis is None for axis in axes):
        raise _bad(function, "no tensor has extent n along an axis")
    if not any(tensor.requires_grad for tensor in tensors):
        raise _bad(function, "no tensor is an nn.Parameter")

    def build(given: Sequence[Tensor]) -> Arguments:
        remaining = iter(given)
        args, kwargs = map_tensors(lambda _: next(remaining), made)
        return args, kwargs

    example = Example(function, tensors, names, axes, build, samples)
    singles = [example.outputs(example.some(n)) for n in range(samples)]
    example.places = places(ledger.subject, example.outputs(), singles)
    if not example.places:
        raise _bad(function, "with these arguments no output requires a gradient")
    return example


def _split(made: Any) -> Arguments:
    if isinstance(made, dict):
        return (), made
    return (tuple(made) if isinstance(made, (tuple, list)) else (made,)), {}


def _bad(function: Callable[..., Any], why: str) -> BadInput:
    return BadInput(
        f"check_use({name_of(function)}, make) was called.",
        "what make(n) returns",
        why,
        "return a tuple of arguments, or a dictionary of keyword arguments, with parameters as "
        "nn.Parameter and n samples along one axis of each tensor that holds samples",
    )


def _names(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """What tensors among the arguments are called: by the function's signature, if it has one."""
    try:
        known = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # most functions of torch
        known = []
    spelled = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    spelled += [f"argument {place}" for place in range(len(spelled), len(args))]
    names = []
    for name, value in [*zip(spelled, args, strict=False), *kwargs.items()]:
        count = sum(1 for _ in tensors_in(value))
        names += [name] if count == 1 else [f"{name}[{place}]" for place in range(count)]
    return names
