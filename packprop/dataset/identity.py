"""What a run over a data set is of: model, loss, extensions, options, versions; and how two of them differ."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from packprop.tensors.sharding import class_before_sharding, whole_tensor
from packprop.types import Extension

Identity = dict[str, Any]
"""Facts by name, as JSON has them."""

PIECE = 2**24
"""Bytes of a tensor that are read at once."""

SPOTS = 1024
"""Entries of a tensor that stand for all of them where only a change of the data shall be noticed."""


def packprop_version() -> str | None:
    """The version of packprop that is installed, if one is."""
    try:
        return importlib.metadata.version("packprop")
    except importlib.metadata.PackageNotFoundError:  # a source tree that was not installed
        return None


def identity_of(model: nn.Module, loss: Any, extensions: Sequence[Extension], **options: Any) -> Identity:
    """What a run is of. Where two runs differ in nothing of this, one goes on from where the other ended.

    Args:
        model: Names, shapes, precision and values of its parameters and buffers count, which of them are
            trained, and which modules are in training mode.
        loss: Its name, its options, and the values of its tensors.
        extensions: Their names and options; of a generator that there is one.
        options: Facts that have a form in JSON.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "extensions": [_described(extension) for extension in extensions],
        "model": {
            "class": _name_of(class_before_sharding(model)),
            "tensors": {name: _kind_of(tensor) for name, tensor in tensors.items()},
            "in training mode": [name for name, module in model.named_modules() if module.training],
        },
        "values of the model's parameters and buffers": {
            name: digest(tensor) for name, tensor in tensors.items()
        },
        "loss": _described(loss),
        **options,
        "version of packprop": packprop_version(),
        "version of torch": torch.__version__,
    }


def difference(saved: Identity, asked: Identity) -> tuple[str, str] | None:
    """The first fact that differs: its name, and what both sides say; ``None`` if there is none."""
    for name in dict.fromkeys([*asked, *saved]):
        if saved.get(name) != asked.get(name):
            return name, _first_difference(saved.get(name), asked.get(name))
    return None


def digest(tensor: Tensor) -> str:
    """A short text that another tensor does not have, whatever device it is on.

    Of a ``DTensor`` all ranks must ask at once, and get the same.
    """
    found = hashlib.blake2b(digest_size=8)
    flat = whole_tensor(tensor.detach()).contiguous().view(-1)
    step = max(1, PIECE // max(1, flat.element_size()))
    for start in range(0, len(flat), step):
        found.update(_bytes_of(flat[start : start + step]))
    return found.hexdigest()


def spot_check(tensors: Sequence[Tensor]) -> str:
    """A short text of shapes, types and some entries of tensors, which are too many to look at whole."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(_kind_of(tensor).encode())
        flat = tensor.detach().reshape(-1)
        found.update(_bytes_of(flat[:: max(1, len(flat) // SPOTS)]))
    return found.hexdigest()


def _bytes_of(flat: Tensor) -> Any:
    # a copy: memory that numpy has seen is never resized again, as fully_shard does with that of parameters
    own = flat.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return own.view(torch.uint8).numpy() if len(flat) else b""


def _kind_of(tensor: Tensor) -> str:
    trained = ", trained" if tensor.requires_grad else ""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{trained}"


def _name_of(named: Any) -> str:
    return f"{named.__module__}.{named.__qualname__}"


def _described(value: Any) -> Any:
    """Options in a form that can be compared: names of classes and functions, values of tensors."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Generator):
        return "a generator"
    if isinstance(value, Tensor):
        return f"{_kind_of(value)} {digest(value)}"
    if isinstance(value, Mapping):
        return {str(key): _described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [_described(item) for item in value]
    if isinstance(value, functools.partial):
        return ["partial", _described(value.func), _described(value.args), _described(value.keywords)]
    if hasattr(value, "__qualname__"):
        return _name_of(value)
    if isinstance(value, nn.Module):
        facts = {key: item for key, item in vars(value).items() if not key.startswith("_")}
        tensors = {**dict(value.named_parameters()), **dict(value.named_buffers())}
        return {"class": _name_of(type(value)), **_described(facts), **_described(tensors)}
    if dataclasses.is_dataclass(value) or isinstance(value, Extension):
        names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
        facts = {name: getattr(value, name) for name in names} | getattr(value, "__dict__", {})
        return {"class": _name_of(type(value)), **{name: _described(fact) for name, fact in facts.items()}}
    return _name_of(type(value))


def _first_difference(saved: Any, asked: Any) -> str:
    """Where two facts differ, as a sentence."""
    if isinstance(saved, dict) and isinstance(asked, dict):
        for key in dict.fromkeys([*saved, *asked]):
            if saved.get(key) != asked.get(key):
                return f"{key}: {_first_difference(saved.get(key), asked.get(key))}"
    if isinstance(saved, list) and isinstance(asked, list) and len(saved) == len(asked):
        for one, other in zip(saved, asked, strict=True):
            if one != other:
                return _first_difference(one, other)
    return f"{_short(saved)} there, {_short(asked)} here"


def _short(fact: Any) -> str:
    if isinstance(fact, list) and all(isinstance(item, dict) and "class" in item for item in fact):
        fact = [item["class"].rpartition(".")[2] for item in fact]
    text = str(fact)
    return text if len(text) <= 80 else f"{text[:77]}..."
