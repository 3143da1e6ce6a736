"""A call of the checked function, for all of its samples or for one alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from packprop.engine.tensors import Layout, map_tensors, tensors_in
from packprop.errors import BadInput
from packprop.testing.loops import layouts_of
from packprop.testing.problem import differentiable, fixed_random_state
from packprop.testing.report import Ledger

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

Make = Callable[[int], Any]
"""A function from a number of samples to arguments."""


@dataclass
class Example:
    """Arguments of a function for some samples.

    Args:
        function: The function.
        tensors: All tensors among the arguments, parameters included, in order.
        names: The names of these tensors.
        axes: The axis that holds the samples in each tensor; ``None`` for a tensor without samples.
        build: Makes the arguments from a replacement for each tensor.
        samples: Number of samples.
        layouts: The layouts of the outputs.
    """

    function: Callable[..., Any]
    tensors: list[Tensor]
    names: list[str]
    axes: list[int | None]
    build: Callable[[Sequence[Tensor]], Arguments]
    samples: int
    layouts: list[Layout] = field(default_factory=list)

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters among the arguments, each once, by name."""
        pairs = zip(self.names, self.tensors, strict=True)
        named = {tensor: name for name, tensor in pairs if isinstance(tensor, nn.Parameter)}
        return {name: parameter for parameter, name in named.items()}

    def outputs(self, tensors: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return the outputs of the function that require a gradient."""
        args, kwargs = self.build(self.tensors if tensors is None else tensors)
        return differentiable(self.function(*args, **kwargs))

    def alone(self, sample: int) -> list[Tensor]:
        """Return the tensors, narrowed to one sample."""
        return [
            tensor if axis is None else tensor.narrow(axis, sample, 1).clone()
            for tensor, axis in zip(self.tensors, self.axes, strict=True)
        ]


def make_example(
    ledger: Ledger,
    function: Callable[..., Any],
    make: Make,
    samples: int,
    like: Example | None = None,
) -> Example:
    """Call ``make`` for a number of samples; take the parameters from ``like`` if it is given."""
    with fixed_random_state(seed=0 if like is None else 1):
        arguments, larger = (_split(make(count)) for count in (samples, samples + 1))
    given, grown = list(tensors_in(arguments)), list(tensors_in(larger))
    if len(given) != len(grown):
        raise _bad(function, "the number of tensors depends on the number of samples")
    names = _names(function, *arguments)
    tensors: list[Tensor] = []
    axes: list[int | None] = []
    parameters: dict[int, Tensor] = {}
    for place, (tensor, other) in enumerate(zip(given, grown, strict=True)):
        double = tensor.detach().double() if tensor.is_floating_point() else tensor
        if tensor.requires_grad:
            new = nn.Parameter(double.clone()) if like is None else like.tensors[place]
            tensors.append(parameters.setdefault(id(tensor), new))
            axes.append(None)
            continue
        tensors.append(double)
        pairs = list(zip(tensor.shape, other.shape, strict=False))
        changed = [a for a, pair in enumerate(pairs) if pair == (samples, samples + 1)]
        if len(changed) > 1 or tensor.dim() != other.dim():
            raise _bad(function, f"{names[place]} holds samples on several axes")
        axes.append(changed[0] if changed else None)
    if all(axis is None for axis in axes):
        raise _bad(function, "no tensor has extent n along an axis")
    if not any(tensor.requires_grad for tensor in tensors):
        raise _bad(function, "no tensor is an nn.Parameter")

    def build(replacements: Sequence[Tensor]) -> Arguments:
        remaining = iter(replacements)
        args, kwargs = map_tensors(lambda _: next(remaining), arguments)
        return args, kwargs

    example = Example(function, tensors, names, axes, build, samples)
    singles = [example.outputs(example.alone(n)) for n in range(samples)]
    example.layouts = layouts_of(ledger.subject, example.outputs(), singles)
    if not example.layouts:
        raise _bad(function, "with these arguments no output requires a gradient")
    return example


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function; ``MyFunction.apply`` includes its class."""
    owner = _class_of(function)
    name = getattr(function, "__name__", function)
    return str(name) if owner is None else f"{owner.__name__}.{name}"


def _class_of(function: Callable[..., Any]) -> type[torch.autograd.Function] | None:
    """Return the ``autograd.Function`` class that ``apply`` belongs to; ``None`` for other functions."""
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) else None


def _split(value: Any) -> Arguments:
    if isinstance(value, dict):
        return (), value
    return (tuple(value) if isinstance(value, (tuple, list)) else (value,)), {}


def _bad(function: Callable[..., Any], why: str) -> BadInput:
    return BadInput(
        f"check_use({name_of(function)}, make) was called.",
        "what make(n) returns",
        why,
        "return a tuple of arguments, or a dictionary of keyword arguments, with parameters as "
        "nn.Parameter and n samples along one axis of each tensor that holds samples",
    )


def _names(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """Return names of the tensors among the arguments, from the function's signature if it has one."""
    owner = _class_of(function)
    try:
        known = list(inspect.signature(function if owner is None else owner.forward).parameters.values())
        if owner is not None and owner.setup_context is torch.autograd.Function.setup_context:
            known = known[1:]  # ctx
    except (TypeError, ValueError):  # most functions of torch
        known = []
    spelled = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    spelled += [f"argument {place}" for place in range(len(spelled), len(args))]
    names = []
    for name, value in [*zip(spelled, args, strict=False), *kwargs.items()]:
        count = sum(1 for _ in tensors_in(value))
        names += [name] if count == 1 else [f"{name}[{place}]" for place in range(count)]
    return names
