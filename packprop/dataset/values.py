"""Values of any nesting as plain data and a list of tensors, and back: what files are made of."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from packprop.algebra.kronecker import Eigen
from packprop.algebra.monoid import Moments
from packprop.algebra.order import EntryOrder, Fold, fold_swapped, fold_to

Plain = Any
"""Numbers, texts, lists and dictionaries, as JSON has them."""


class SavedShards(NamedTuple):
    """Stands for a tensor whose shards are in files that the ranks have written.

    Args:
        name: Its name there.
        shape: The shape of the whole tensor.
        dtype: The name of its precision, as ``float64``.
    """

    name: str
    shape: list[int]
    dtype: str


TUPLES: dict[str, Any] = {"Moments": Moments, "Eigen": Eigen, "SavedShards": SavedShards}
"""Named tuples that values are made of."""


class NotPlainError(TypeError):
    """A value holds something that is neither plain nor a tensor."""


def encode(value: Any, tensors: list[Tensor]) -> Plain:
    """The value as plain data; its tensors are appended to ``tensors``, and named by their places there.

    Raises:
        NotPlainError: With the type that has no form in a file.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        tensor = value.detach()
        kind = "complex" if tensor.is_complex() else "tensor"
        tensors.append(torch.view_as_real(tensor.resolve_conj()) if kind == "complex" else tensor)
        return {kind: len(tensors) - 1}
    if isinstance(value, EntryOrder):
        return {"order": encode(_described(value), tensors)}
    if type(value).__name__ in TUPLES and isinstance(value, tuple):
        return {type(value).__name__: [encode(item, tensors) for item in value]}
    if isinstance(value, list):
        return [encode(item, tensors) for item in value]
    if type(value) in (tuple, torch.Size):
        return {"tuple": [encode(item, tensors) for item in value]}
    if isinstance(value, Mapping):
        return {"items": [[encode(key, tensors), encode(item, tensors)] for key, item in value.items()]}
    if isinstance(value, bytes):
        tensors.append(
            torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0).byte()
        )
        return {"bytes": len(tensors) - 1}
    if isinstance(value, (np.ndarray, np.generic)):
        tensors.append(torch.from_numpy(np.array(value)))
        return {"array": len(tensors) - 1}
    raise NotPlainError(f"{type(value).__module__}.{type(value).__qualname__}")


def decode(plain: Plain, tensors: Sequence[Tensor]) -> Any:
    """The value that ``encode`` was given; mappings are dictionaries."""
    if isinstance(plain, list):
        return [decode(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "complex":
        return torch.view_as_complex(tensors[content])
    if kind == "bytes":
        return tensors[content].cpu().numpy().tobytes()
    if kind == "array":
        return tensors[content].cpu().numpy()
    if kind == "order":
        return _order(*decode(content, tensors))
    if kind == "items":
        return {decode(key, tensors): decode(item, tensors) for key, item in content}
    items = [decode(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else TUPLES[kind](*items)


def _described(order: EntryOrder) -> list[Any]:
    """Where entries are kept: by the name of the fold if it is one of packprop's own, else place by place."""
    shape = order.parameter
    for name, fold in (("same", fold_to), ("swapped", fold_swapped)):
        if order.fold is fold(shape):
            return [name, list(order.shape), list(shape), None]
    places = torch.arange(torch.Size(order.shape).numel())
    return ["places", list(order.shape), list(shape), order.to_parameter(places).flatten()]


def _order(name: str, extents: list[int], shape: list[int], places: Tensor | None) -> EntryOrder:
    groups, fan_out, fan_in = extents
    fold: Fold
    if places is not None:
        fold = functools.partial(_gathered, places=places, shape=torch.Size(shape))
    else:
        fold = {"same": fold_to, "swapped": fold_swapped}[name](torch.Size(shape))
    return EntryOrder(fold, (groups, fan_out, fan_in))


def _gathered(gradient: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """``[..., g, o, i] -> [..., *p]``, by where each entry comes from."""
    leading = gradient.shape[:-3]
    if gradient.device.type == "meta":
        return gradient.new_empty(leading + shape)
    return gradient.flatten(-3)[..., places.to(gradient.device)].reshape(leading + shape)
