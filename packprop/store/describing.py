"""Descriptions, in a store, of the extensions and the model behind its values."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from packprop.engine.tensors import named_parameters
from packprop.errors import BadInput
from packprop.extensions.arguments import require_own_savefields
from packprop.store.checksums import checksum_of_tensor
from packprop.store.folder import ParameterFacts
from packprop.store.plain import name_of
from packprop.types import Extension


def packprop_version() -> str | None:
    """Return the version of packprop that is installed, if one is."""
    try:
        return importlib.metadata.version("packprop")
    except importlib.metadata.PackageNotFoundError:  # a source tree that was not installed
        return None


def described_extension(extension: Extension) -> dict[str, Any]:
    """Return name, attribute, options and degrees of an extension, as values of JSON."""
    options = _plain(_parts(extension))
    attribute, degrees = extension.savefield, [float(degree) for degree in extension.degrees]
    return {"name": extension.name, "attribute": attribute, "options": options, "degrees": degrees}


def _parts(value: Any) -> dict[str, Any]:
    """Return the options of a dataclass by name, or the attributes of another object."""
    if not dataclasses.is_dataclass(value):
        return getattr(value, "__dict__", {})
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}


def described_model(model: nn.Module) -> dict[str, ParameterFacts]:
    """Return names, shapes and precisions of all parameters, and which are trained."""
    return {
        name: (list(parameter.shape), name_of(parameter.dtype), parameter.requires_grad)
        for name, parameter in named_parameters(model)
    }


def require_same_parameters(
    asked: str, folder: str, known: Mapping[str, ParameterFacts], model: nn.Module
) -> None:
    """Refuse a model whose parameters, or whose trained parameters, differ from those that a store describes.

    Raises:
        BadInput: With the first of them.
    """
    now = described_model(model)
    for name in {**known, **now}:
        there, here = known.get(name), now.get(name)
        if there == here:
            continue
        why = "the store was opened for a model with other parameters"
        if there is not None and here is not None and there[:2] == here[:2]:
            why = (
                "it requires gradients now, and did not when the store was opened"
                if here[2]
                else "it required gradients when the store was opened, and does not now"
            )
        instead = "write a separate store for each choice of trained parameters"
        raise BadInput(asked, f"parameter {name!r}, with the store {folder!r}", why, instead)


def grows(extension: Extension) -> bool:
    """Tell whether the value has a row for each sample, so that batches can be joined row by row."""
    return all(row.over_n.grows and not row.whole for row in extension.rows)


def require_storable(asked: str, extensions: Sequence[Extension]) -> None:
    """Refuse extensions whose values have no rows of samples.

    Raises:
        BadInput: With the first of them.
    """
    for extension in extensions:
        if not grows(extension):
            raise BadInput(
                asked,
                f"extension {extension.name}",
                "its value does not have a row for each sample, so there is nothing to append",
                "leave it out: packprop.compute(..., store=...) stores the others, and returns this value",
            )
        if extension.subsampling is not None:
            raise BadInput(
                asked,
                f"extension {extension.name}(subsampling=...)",
                "it has rows for some samples of a batch, and a store needs a row for each sample",
                "leave subsampling out, or use batches that hold only these samples",
            )
    require_own_savefields(asked, extensions, "store one of them, or each in its own folder")


def _plain(value: Any) -> Any:
    """Return a value of JSON for an option."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Generator):
        return {"generator": value.initial_seed()}
    if isinstance(value, (list, tuple, range)):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Extension):
        return described_extension(value)
    if isinstance(value, (Tensor, np.ndarray)):
        content = checksum_of_tensor(torch.as_tensor(value, device="cpu").detach())
        return {"shape": [*value.shape], "dtype": str(value.dtype), "checksum": content}
    if isinstance(value, (torch.dtype, torch.device, complex, slice, np.generic)):
        return str(value)
    return getattr(value, "__qualname__", type(value).__name__)
