"""Conversion of nested values to plain data and a list of tensors, for files, and back."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from packprop.engine.algebra import Eigen, EntryOrder, Fold, Moments, fold_swapped, fold_to
from packprop.store.schema import Size, Unfit, fitted

Plain = Any
"""Values of JSON: numbers, texts, lists and dictionaries."""


TUPLES: dict[str, Any] = {"Moments": Moments, "Eigen": Eigen}
"""Named tuples inside values."""

_ORDER = tuple[Literal["same", "swapped", "places"], tuple[Size, Size, Size], list[Size], Tensor | None]
"""The description of an order of entries."""


class NotPlainError(TypeError):
    """Raised if a value holds something that is neither plain nor a tensor."""


def encode(value: Any, tensors: list[Tensor]) -> Plain:
    """Return the value as plain data that names its tensors by index; append the tensors to ``tensors``.

    Raises:
        NotPlainError: For a value that no file can hold, with its type.
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
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")  # frombuffer refuses an empty buffer
        tensors.append(torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else nothing)
        return {"bytes": len(tensors) - 1}
    if isinstance(value, (np.ndarray, np.generic)):
        tensors.append(torch.from_numpy(np.array(value)))
        return {"array": len(tensors) - 1}
    raise NotPlainError(f"{type(value).__module__}.{type(value).__qualname__}")


def decode(plain: Plain, tensors: Sequence[Tensor]) -> Any:
    """Return the value that ``encode`` was given; mappings become dictionaries.

    Raises:
        Unfit: For plain data that ``encode`` has not made.
    """
    try:
        return _decoded(plain, tensors)
    except Unfit:
        raise
    except (LookupError, TypeError, ValueError, RuntimeError) as error:  # from data that others have written
        raise Unfit(f"it does not say which values it holds ({type(error).__name__}: {error})") from error


def _decoded(plain: Plain, tensors: Sequence[Tensor]) -> Any:
    if isinstance(plain, list):
        return [_decoded(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind in ("tensor", "complex", "bytes", "array"):
        tensor = tensors[fitted(Size, content, kind)]
        if kind == "complex":
            return torch.view_as_complex(tensor)
        if kind == "tensor":
            return tensor
        return tensor.cpu().numpy() if kind == "array" else tensor.cpu().numpy().tobytes()
    if kind == "order":
        return _order(*fitted(_ORDER, _decoded(content, tensors), kind))
    if kind == "items":
        return {_decoded(key, tensors): _decoded(item, tensors) for key, item in content}
    items = [_decoded(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else TUPLES[kind](*items)


def _described(order: EntryOrder) -> list[Any]:
    """Describe an order of entries: by the fold's name if the fold is packprop's own, else by each place."""
    shape = order.parameter
    for name, fold in (("same", fold_to), ("swapped", fold_swapped)):
        if order.fold is fold(shape):
            return [name, list(order.shape), list(shape), None]
    places = torch.arange(torch.Size(order.shape).numel(), device="cpu")
    return ["places", list(order.shape), list(shape), order.to_parameter(places).flatten()]


def _order(name: str, extents: tuple[int, int, int], shape: list[int], places: Tensor | None) -> EntryOrder:
    fold: Fold
    if math.prod(extents) != math.prod(shape):
        raise Unfit(f"an order of {list(extents)} does not fit a parameter of {shape}")
    if places is not None:
        if places.dtype != torch.int64 or len(places) != math.prod(shape):
            raise Unfit(f"{len(places)} places of {places.dtype} do not fit a parameter of {shape}")
        fold = functools.partial(_gathered, places=places, shape=torch.Size(shape))
    else:
        fold = {"same": fold_to, "swapped": fold_swapped}[name](torch.Size(shape))
    return EntryOrder(fold, extents)


def _gathered(gradient: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Map ``[..., g, o, i]`` to ``[..., *p]``, by the source of each entry."""
    leading = gradient.shape[:-3]
    if gradient.device.type == "meta":
        return gradient.new_empty(leading + shape)
    return gradient.flatten(-3)[..., places.to(gradient.device)].reshape(leading + shape)
