"""The dependencies of a trace: the modules as they are, the batch, the settings around the call."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from packprop.applications.compiled.facts import (
    CONTAINERS,
    VALUES,
    Memo,
    Same,
    facts_if_small,
    facts_of,
    plain_fact,
)
from packprop.engine.recording import declared_around, is_recording_disabled
from packprop.engine.tensors import PLAIN, AutocastRegions, attributes_of, has_late_hooks, is_hooked, tensors_in

REGISTERED = ("_parameters", "_buffers")
OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
HOOKS = frozenset(name for name in OF_EVERY_MODULE if name.endswith("_hooks"))
"""Attributes that every module has, and those among them that hold hooks."""
SMALL = (NoneType, *VALUES, np.generic)
"""Types of the attributes of parameters that packprop compares."""
OWN = "_packprop"
"""The beginning of names of attributes that packprop gives to modules."""


@dataclass(frozen=True)
class State:
    """The tensors that a pass reads, and everything else that decides its work.

    Args:
        parameters: Parameters and buffers of the modules, each once.
        batch: Tensors of the batch, each once.
        key: Equal for two calls if one graph serves both.
    """

    parameters: list[Tensor]
    batch: list[Tensor]
    key: tuple[Any, ...]

    @property
    def tensors(self) -> list[Tensor]:
        """The inputs of a graph."""
        return [*self.parameters, *self.batch]


def state_of(modules: Sequence[nn.Module], loss: Any, extensions: Sequence[Any], batch: Any) -> State:
    """Describe all that a pass depends on: modules, loss, extensions, batch, the settings around the call."""
    parts = [module for root in modules for module in root.modules()]
    known = _Known([], {}, set(), {*map(id, parts)}, {})
    key: list[Any] = [_described(module, known) for module in parts]
    key += [facts_of(each, known.modules) for each in (loss, tuple(extensions))]
    given = {id(tensor): tensor for tensor in tensors_in(batch)}
    key.append(facts_of(batch, known.modules, {tensor: place for place, tensor in enumerate(given)}))
    key += map(_kind, known.parameters)
    key += map(_kind, given.values())
    key.append(_surroundings([*known.parameters, *given.values()], known))
    return State(known.parameters, [*given.values()], tuple(key))


class _Known(NamedTuple):
    """The descriptions so far.

    Args:
        parameters: Parameters and buffers, each once.
        numbers: Their places, by identity.
        seen: Objects that were described, by identity.
        modules: All modules that are described, by identity.
        memo: Descriptions of small objects.
    """

    parameters: list[Tensor]
    numbers: dict[int, int]
    seen: set[int]
    modules: set[int]
    memo: Memo

    def number(self, tensor: Tensor) -> int:
        """Return the place of a parameter or buffer, at the end if it is new."""
        if id(tensor) not in self.numbers:
            self.numbers[id(tensor)] = len(self.parameters)
            self.parameters.append(tensor)
        return self.numbers[id(tensor)]

    def facts_if_small(self, value: Any) -> Any:
        """Describe a value that is not public."""
        return facts_if_small(value, self.modules, self.numbers, self.memo)


def _described(module: nn.Module, known: _Known) -> tuple[Any, ...]:
    """Describe a module without its submodules: its class, its tensors by number, its attributes."""
    found: list[Any] = [Same(module), type(module)]
    attributes = module.__dict__
    is_of_torch = type(module).__module__.startswith("torch.")  # a pass may change its private attributes
    for name in REGISTERED:
        for own, tensor in attributes[name].items():
            found.append(own)
            found.append(None if tensor is None else known.number(tensor))
            if tensor is not None and tensor.__dict__:  # it also holds results of passes, which are not plain
                plain = [(key, each) for key, each in tensor.__dict__.items() if isinstance(each, SMALL)]
                found += [(key, known.facts_if_small(each)) for key, each in plain if not key.startswith("_")]
    for name, value in attributes.items():
        kind = type(value)
        if kind in PLAIN:
            found += (name, plain_fact(value))
        elif isinstance(value, Tensor):
            if value.is_leaf or not _is_made_by_hook(name, attributes["_forward_pre_hooks"]):
                found += (name, Same(value))
        elif name == "_modules":
            found += [(own, id(child)) for own, child in value.items()]
        elif name in HOOKS:
            others = [known.facts_if_small(hook) for hook in value.values() if not _is_own(hook)]
            found += (name, *others) if others else ()
        elif name in OF_EVERY_MODULE or name.startswith(OWN):
            continue
        elif name.startswith("_"):
            if not is_of_torch:
                found += (name, known.facts_if_small(value))
        elif id(value) in known.seen:  # a configuration, which many modules may share
            found += (name, Same(value))
        else:
            if kind not in CONTAINERS:
                known.seen.add(id(value))
            found += (name, facts_of(value, known.modules))
    return tuple(found)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """Describe what a graph assumes about an input."""
    strides = tensor.stride() if tensor.layout is torch.strided else None
    hooked = is_hooked(tensor) or has_late_hooks(tensor)
    kind = type(tensor), tensor.shape, strides, tensor.dtype, tensor.device
    return *kind, tensor.requires_grad, tensor.is_leaf, hooked


def _is_made_by_hook(name: str, hooks: Mapping[int, Any]) -> bool:
    """Tell whether a hook sets an attribute in each pass: such a hook holds the name, as in weight norm."""
    held = [each for hook in hooks.values() for _, each in attributes_of(hook)]
    return any(type(each) is str and each == name for each in held)


def _is_own(hook: Any) -> bool:
    """Tell whether a hook is packprop's."""
    return str(getattr(hook, "__module__", "")).startswith("packprop.")


def _surroundings(tensors: Iterable[Tensor], known: _Known) -> tuple[Any, ...]:
    """Describe the settings around a call."""
    regions = AutocastRegions.now({tensor.device.type for tensor in tensors}).regions
    hooks = tuple(
        (number, known.facts_if_small(each)) for kind in _GLOBAL_HOOKS for number, each in kind.items()
    )
    settings = torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()
    return regions, is_recording_disabled(), declared_around(), *settings, hooks


_GLOBAL_HOOKS = [
    value
    for name, value in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and isinstance(value, dict)
]
"""The hooks on all modules; nothing public lists them."""


def python_random_states() -> tuple[Any, ...]:
    """Return the states of Python's and NumPy's generators, which a replay does not draw from."""
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return (random.getstate(),)
    name, keys, *rest = numpy.get_state()
    return random.getstate(), name, keys.tobytes(), *rest


def first_change(modules: Sequence[nn.Module], before: tuple[Any, ...], now: State) -> str:
    """Describe the first change in what a pass depends on."""
    parts = [(name, type(part).__name__) for root in modules for name, part in root.named_modules()]
    labels = [f"module {name!r} ({kind})" if name else kind for name, kind in parts]
    labels += ["the loss", "the extensions", "the nesting of the batch"]
    named = [each for root in modules for each in (*root.named_parameters(), *root.named_buffers())]
    names = {id(tensor): name for name, tensor in named}
    labels += [f"parameter or buffer {names.get(id(tensor), '')!r}" for tensor in now.parameters]
    labels += [f"tensor {number} of the batch" for number in range(len(now.batch))]
    labels.append(
        "what is in force around the call (autocast, record, disable, deterministic algorithms, default type)"
    )
    labels += ["whether gradients are there"] * (len(now.key) - len(labels))
    if len(before) != len(now.key) or len(labels) != len(now.key):
        return "the number of modules, parameters or tensors"
    for label, old, new in zip(labels, before, now.key, strict=True):
        if old != new:
            return f"{label}: {_first_difference(old, new)}"
    return "nothing that can be named"


def _first_difference(old: Any, new: Any) -> str:
    """Describe the first difference of two descriptions, in which a name may precede a value."""
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new) and type(old) is tuple:
        place = next(place for place, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1])
        named = f"{old[place - 1]} " if place and isinstance(old[place - 1], str) else ""
        return f"{named}{_first_difference(old[place], new[place])}"
    if isinstance(old, tuple) and isinstance(new, tuple) and type(old) is tuple:
        added = [each for each in (*new, *old) if isinstance(each, str) and (each in new) != (each in old)]
        return f"{added[0]!r} is new, or gone" if added else "it has more or less than before"
    return f"{_said(old)} before, {_said(new)} now"


def _said(value: Any) -> str:
    return str(list(value)) if isinstance(value, torch.Size) else repr(value)
