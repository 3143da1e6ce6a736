"""The dependencies of a trace: the modules as they are, the batch, the settings around the call."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from packprop.applications.compiled.facts import CONTAINERS, Same, facts_of, plain_fact
from packprop.engine.passes import AutocastRegions
from packprop.engine.recording import is_recording_disabled
from packprop.engine.tensors import PLAIN, has_late_hooks, is_hooked, tensors_in

REGISTERED = ("_parameters", "_buffers")
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


def state_of(modules: Sequence[nn.Module], loss: Any, batch: Any) -> State:
    """Describe what a pass of these modules, with a loss that may be a function, on a batch depends on."""
    parameters: dict[int, Tensor] = {}
    seen: set[int] = set()
    parts = [module for root in modules for module in root.modules()]
    registered = {*map(id, parts)}
    key: list[Any] = [_described(module, parameters, seen, registered) for module in parts]
    key.append(facts_of(loss, registered))
    given = {id(tensor): tensor for tensor in tensors_in(batch)}
    key.append(facts_of(batch, registered, {tensor: place for place, tensor in enumerate(given)}))
    key += map(_kind, parameters.values())
    key += map(_kind, given.values())
    key.append(_surroundings([*parameters.values(), *given.values()]))
    return State([*parameters.values()], [*given.values()], tuple(key))


def _described(
    module: nn.Module, parameters: dict[int, Tensor], seen: set[int], registered: set[int]
) -> tuple[Any, ...]:
    """Describe a module without its submodules: its class, its tensors by number, its plain attributes.

    Args:
        module: The module.
        parameters: The known tensors, by identity; this adds the module's own.
        seen: Other objects that were described, by identity.
        registered: All modules that are described, by identity.
    """
    found: list[Any] = [Same(module), type(module)]
    attributes = module.__dict__
    for name in REGISTERED:
        for own, tensor in attributes[name].items():
            found.append(own)
            found.append(None if tensor is None else _number(tensor, parameters))
            if tensor is not None and tensor.__dict__:  # results of passes are there too, which are not plain
                plain = [(key, each) for key, each in tensor.__dict__.items() if type(each) in PLAIN]
                found += [(key, plain_fact(each)) for key, each in plain if not key.startswith("_")]
    for name, value in attributes.items():
        kind = type(value)
        if kind in PLAIN:
            found += (name, plain_fact(value))
        elif isinstance(value, Tensor):
            if value.is_leaf or not attributes["_forward_pre_hooks"]:  # hooks make weights anew in each pass
                found += (name, Same(value))
        elif name == "_modules":
            found += [(own, id(child)) for own, child in value.items()]
        elif name.endswith("_hooks"):  # of all kinds, as torch.nn.Module has them
            others = (
                [facts_of(hook, registered) for hook in value.values() if not _is_own(hook)] if value else ()
            )
            found += (name, *others) if others else ()
        elif name.startswith("_") and (kind not in CONTAINERS or name in REGISTERED or name.startswith(OWN)):
            continue
        elif id(value) in seen:  # a configuration, which many modules may share
            found += (name, Same(value))
        else:
            if kind not in CONTAINERS:
                seen.add(id(value))
            found += (name, facts_of(value, registered))
    return tuple(found)


def _number(tensor: Tensor, known: dict[int, Tensor]) -> int:
    """Return the place of a tensor among the known ones, at the end if it is new."""
    if id(tensor) not in known:
        known[id(tensor)] = tensor
        return len(known) - 1
    return list(known).index(id(tensor))


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """Describe what a graph assumes about an input."""
    kind = type(tensor)
    strides = tensor.stride() if tensor.layout is torch.strided else None
    hooked = is_hooked(tensor) or has_late_hooks(tensor)
    return (
        kind,
        tensor.shape,
        strides,
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_leaf,
        hooked,
    )


def _is_own(hook: Any) -> bool:
    """Tell whether a hook is packprop's."""
    return str(getattr(hook, "__module__", "")).startswith("packprop.")


def _surroundings(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """Describe the settings around a call."""
    regions = AutocastRegions.now({tensor.device.type for tensor in tensors}).regions
    hooks = tuple(map(tuple, _GLOBAL_HOOKS))  # their numbers, which no two hooks share
    return regions, is_recording_disabled(), torch.are_deterministic_algorithms_enabled(), hooks


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
    """Name the first thing that decides on a pass and has changed."""
    labels = [_label(name, module) for root in modules for name, module in root.named_modules()]
    labels += ["the loss", "the nesting of the batch"]
    names = {id(tensor): name for root in modules for name, tensor in _named_tensors(root)}
    labels += [f"parameter or buffer {names.get(id(tensor), '')!r}" for tensor in now.parameters]
    labels += [f"tensor {number} of the batch" for number in range(len(now.batch))]
    labels.append("what is in force around the call (autocast, disable(), deterministic algorithms)")
    labels += ["whether gradients are there"] * (len(now.key) - len(labels))
    if len(before) != len(now.key) or len(labels) != len(now.key):
        return "how many modules, parameters or tensors there are"
    for label, old, new in zip(labels, before, now.key, strict=True):
        if old != new:
            return f"{label}: {_first_difference(old, new)}"
    return "nothing that can be named"


def _label(name: str, module: nn.Module) -> str:
    return f"module {name!r} ({type(module).__name__})" if name else f"{type(module).__name__}"


def _named_tensors(root: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from root.named_parameters()
    yield from root.named_buffers()


def _first_difference(old: Any, new: Any) -> str:
    """Say where two descriptions differ; what stands before a value in one is its name."""
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
