"""Where users say that the samples of a module's inputs are."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from packprop.errors import BadInput
from packprop.tensors.nesting import tensors_in

SampleAxis = int | Sequence[int | None] | Mapping[str, int | None]
"""An axis for all tensors that have it, or one for each argument, in order or by name; ``None``: no samples."""


AXIS = "_packprop_sample_axis"
"""Attribute of an extended module: where its inputs hold the samples."""


def check_sample_axis(asked: str, declared: Any, module: nn.Module | None = None) -> None:
    """Refuse what is no declaration, and names that the module's forward pass has no argument of.

    Raises:
        BadInput: A ``ValueError``.
    """
    single = not isinstance(declared, (Sequence, Mapping)) or isinstance(declared, str)
    axes = [declared] if single else list(declared.values() if isinstance(declared, Mapping) else declared)
    where = f"sample_axis={declared!r}"
    if not all((axis is None and not single) or type(axis) is int for axis in axes):
        raise BadInput(
            asked,
            where,
            "it is no axis, and no sequence or dictionary of axes",
            "give the axis that holds the samples (1), one for each argument in their order ((1, None)), or by "
            "name ({'src': 1, 'mask': 0}); None is for arguments without samples",
        )
    if isinstance(declared, Mapping) and module is not None:
        arguments = inspect.signature(module.forward).parameters
        unknown = [name for name in declared if name not in arguments]
        if unknown and not any(each.kind is each.VAR_KEYWORD for each in arguments.values()):
            raise BadInput(
                asked,
                f"{where}, name {unknown[0]!r}",
                f"forward() of {type(module).__name__} has the arguments {', '.join(arguments)}",
                "give the names of those that hold samples",
            )


def check_documents(declared: Any) -> None:
    """Refuse what does not say to which document each position belongs.

    Raises:
        BadInput: A ``ValueError``.
    """
    what = type(declared).__name__
    if isinstance(declared, Tensor):
        whole = declared.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
        if whole and 1 <= declared.dim() <= 2 and declared.numel():
            return
        what = f"of shape {list(declared.shape)} and {declared.dtype}"
    raise BadInput(
        "record(documents=...) was entered.",
        f"documents, {what}",
        "it is no tensor of whole numbers [n, t] or [n * t]",
        "give the number of the document at each position of the loss, from 0 on",
    )


def axes_of(
    declared: SampleAxis, module: nn.Module | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[Tensor, int | None]]:
    """The tensors that a module is called with, in order, each with the axis that was declared.

    Raises:
        BadInput: If there is no such axis.
    """
    pairs = []
    for name, number, value in _arguments(module, args, kwargs):
        if isinstance(declared, int):
            axis: int | None = declared
        elif isinstance(declared, Mapping):
            axis = declared.get(name)
        else:
            axis = declared[number] if number is not None and number < len(declared) else None
        for tensor in tensors_in(value):
            own = axis
            if own is not None and not -tensor.dim() <= own < tensor.dim():
                if not isinstance(declared, int):
                    raise _absent(declared, f"argument {name!r} of shape {list(tensor.shape)}")
                own = None
            pairs.append((tensor, own if own is None else own % tensor.dim()))
    if pairs and all(axis is None for _, axis in pairs):
        shapes = ", ".join(str(list(tensor.shape)) for tensor, _ in pairs)
        raise _absent(declared, f"inputs of shapes {shapes}")
    return pairs


def _arguments(
    module: nn.Module | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, int | None, Any]]:
    """Names, numbers and values of what a module is called with."""
    names = [] if module is None else list(inspect.signature(module.forward).parameters)
    for number, value in enumerate(args):
        yield names[number] if number < len(names) else "", number, value
    for name, value in kwargs.items():
        yield name, names.index(name) if name in names else None, value


def _absent(declared: SampleAxis, where: str) -> BadInput:
    return BadInput(
        f"A model was called for which sample_axis={declared!r} was declared.",
        where,
        "no tensor there has the declared axis of samples",
        "declare an axis that the inputs have, by name for inputs of several kinds",
    )
