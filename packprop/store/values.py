"""Values on their way into a store: taken off parameters, checked, in the stored precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from packprop.engine.passes import moment_of
from packprop.engine.tensors import accumulation_dtype, named_parameters
from packprop.errors import BadInput, PackpropError
from packprop.extensions.projected import Projected
from packprop.store.folder import ArrayHeader, ShardHeader, described
from packprop.store.places import file_name
from packprop.store.plain import GrowingArray
from packprop.types import Extension

Key = tuple[str, str]
"""Quantity and parameter; the parameter is ``""`` for values of all of them together."""


def taken_from(
    model: nn.Module,
    extensions: Sequence[Extension],
    terms: float,
    unused_are_zero: bool,
    dtype: torch.dtype | None,
) -> dict[Key, Tensor]:
    """Return a pass's values on the parameters, times ``terms`` to the power that they grow with.

    Raises:
        BadInput: For ``terms`` other than 1, if parts of a value grow with different powers of the loss; for
            numbers too large for the stored precision ``dtype``.
        PackpropError: For a parameter without values, or with those of another pass than others.
    """
    taken: dict[Key, Tensor] = {}
    moments: dict[str, int] = {}
    for extension in extensions:
        degree = extension.degrees[0]
        if terms != 1 and set(extension.degrees) != {degree}:
            raise BadInput(
                f"Values of {extension.name} were to be stored for terms={terms}.",
                f"extension {extension.name}",
                "its parts grow with different powers of the loss, so no single factor rescales all of them",
                "leave terms out, and give all batches the same size",
            )
        missing = []
        for name, parameter in named_parameters(model):
            value = vars(parameter).get(extension.savefield)
            if value is not None:
                put(taken, extension, name, value, dtype or value.dtype, terms**degree)
                if (moment := moment_of(value)) is not None:
                    moments[f"parameter {name!r}, with {extension.savefield}"] = moment
            elif parameter.requires_grad:
                missing.append(name)
        none = not any(key[0] == extension.savefield for key in taken)
        if missing and (none or not unused_are_zero):
            raise PackpropError(
                f"Values of {extension.name} were to be stored.",
                f"parameter {missing[0]!r}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
                f"it has no {extension.savefield}",
                "call backward() inside `with packprop.backpack(*writer.extensions)` before each write; give "
                "unused_are_zero=True if the batch does not use the parameter",
            )
    _require_one_pass(moments)
    return taken


def _require_one_pass(moments: Mapping[str, int]) -> None:
    """Refuse values of several passes, given the moment of the pass of each value."""
    first, last = (choose(moments, key=moments.__getitem__, default="") for choose in (min, max))
    if first and moments[first] != moments[last]:
        raise PackpropError(
            "Values of single samples were to be stored.",
            f"{first} of an earlier pass than that of {last}",
            "rows of a batch come from one pass, and that of the batch has not made this value",
            "ask for all extensions of the writer in each pass, and remove what earlier passes have left, such "
            "as `del parameter.grad_batch`",
        )


def put(
    rows: dict[Key, Tensor],
    extension: Extension,
    name: str,
    value: Tensor,
    dtype: torch.dtype,
    factor: float = 1.0,
) -> None:
    """Put a parameter's value, times a factor, among the rows of a batch, its axis of samples in front.

    Projections of all parameters add up: the sum is the projection of the whole gradient, with its inner
    products. Other rows are rounded to ``dtype``, after the factor: gradients of a mean loss fit into float16
    more often than those of its terms.

    Raises:
        BadInput: For numbers too large for ``dtype``.
    """
    value = value.detach()
    if isinstance(extension, Projected):
        key = extension.savefield, ""
        sum_so_far = rows.get(key)
        if sum_so_far is None:
            rows[key] = value * factor
        else:
            rows[key] = torch.add(sum_so_far, value.to(sum_so_far.device), alpha=factor)
    else:
        key = extension.savefield, name
        value = value if factor == 1 else value.to(accumulation_dtype(value.dtype)) * factor
        value = _rounded(f"Values of {extension.name} were to be stored.", key, value, dtype)
        rows[key] = value.movedim(extension.sample_axis, 0)


def begun_arrays(
    place: Path,
    rows: Mapping[Key, Tensor],
    extensions: Sequence[Extension],
    known: Sequence[ArrayHeader],
    samples: int,
) -> list[tuple[ArrayHeader, GrowingArray]]:
    """Begin files for the rows of new arrays in a shard, with zeros for earlier samples."""
    used = {each.file.lower() for each in known}
    found = []
    for (quantity, parameter), value in rows.items():
        kind = next((each for each in extensions if each.savefield == quantity), None)
        degree = 0.0 if kind is None else kind.degrees[0]
        projection = asdict(kind.projection) if isinstance(kind, Projected) else None
        file, shape, dtype = file_name(quantity, parameter, used), tuple(value.shape[1:]), value.dtype
        header = ArrayHeader(quantity, parameter, file, shape, described(dtype), degree, projection)
        array = GrowingArray(place / file, shape, dtype)
        array.path.unlink(missing_ok=True)  # of a writer that was killed here, or failed
        array.fill(samples)
        if samples:
            array.sync()
        found.append((header, array))
    return found


def converted(asked: str, key: Key, value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return values on the CPU, in the stored precision.

    Raises:
        BadInput: For anything that is no tensor of numbers, or numbers too large for the precision.
    """
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        raise BadInput(
            asked,
            f"values {_name(key)}",
            f"they are of type {type(value).__name__}, not a dense tensor",
            "give a tensor [n, ...]",
        )
    value = value.detach()
    value = value if dtype is None else _rounded(asked, key, value, dtype)
    described(value.dtype)
    return value.cpu()


def _rounded(asked: str, key: Key, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return floating-point values in another precision, and others as they are.

    Raises:
        BadInput: For numbers too large for it; NaN and infinity stay as they are.
    """
    if not value.is_floating_point() or value.dtype == dtype:
        return value
    bound = torch.finfo(dtype).max
    if value.numel() and bound < torch.finfo(value.dtype).max:
        finite = value.nan_to_num(0.0, 0.0, 0.0)
        largest = max(abs(float(each)) for each in finite.aminmax())
        if bound < largest:
            raise BadInput(
                asked,
                f"values {_name(key)}",
                f"the largest is {largest:.3g}, and the largest {dtype} is {bound:.3g}",
                "store them as torch.bfloat16 or torch.float32, or call writer.write with smaller terms",
            )
    return value.to(dtype)


def require_rows(
    asked: str, rows: Mapping[Key, Tensor], samples: int, arrays: Mapping[Key, GrowingArray]
) -> None:
    """Refuse values without a row for each sample, and rows of another kind, shape or precision than before.

    Raises:
        BadInput: With the first of them.
    """
    keys = [*arrays, *rows]
    for quantity in {quantity for quantity, name in keys if not name} & {key[0] for key in keys if key[1]}:
        raise BadInput(
            asked,
            f"values {quantity!r}",
            "some belong to single parameters and some to none, and a name cannot stand for both",
            "give one of them another name",
        )
    for key, value in rows.items():
        if not value.dim() or len(value) != samples:
            raise BadInput(
                asked,
                f"values {_name(key)} of shape {list(value.shape)}",
                f"they do not have a row for each of {samples} samples",
                "give tensors [n, ...] with the samples on the first axis",
            )
        if key not in arrays:
            continue
        shape, dtype = arrays[key].shape, arrays[key].dtype
        if shape != tuple(value.shape[1:]):
            raise BadInput(
                asked,
                f"values {_name(key)}",
                f"their rows have shape {list(value.shape[1:])}, and earlier rows {list(shape)}, as for "
                "sequences of other lengths",
                "pad all batches to one length, with targets that the loss ignores",
            )
        if dtype != value.dtype:
            raise BadInput(
                asked,
                f"values {_name(key)}",
                f"they are {value.dtype}, and earlier values {dtype}",
                "give the writer a dtype, or values of one precision",
            )


def identifiers_of(asked: str, given: Any, start: int, samples: int, header: ShardHeader) -> Tensor:
    """Return whole numbers for the samples of a batch, ``[n]``.

    Raises:
        BadInput: If there is not one for each sample.
    """
    if given is None:
        return torch.arange(start, start + samples, device="cpu") * header.shards + header.shard
    numbers = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    if numbers.shape != (samples,) or (numbers.dtype.kind not in "iu" and samples):
        raise BadInput(
            asked,
            f"identifiers of shape {list(numbers.shape)}, {numbers.dtype}",
            f"a store needs one whole number for each of {samples} samples",
            "give a list or tensor of whole numbers [n]; keep names in a table of your own",
        )
    if samples and numbers.max() > np.iinfo(np.int64).max:
        raise BadInput(
            asked,
            f"identifier {numbers.max()}",
            "identifiers are whole numbers below 2^63",
            "give smaller ones, and keep the large ones in a table of your own",
        )
    return torch.from_numpy(numbers.astype(np.int64))


def _name(key: Key) -> str:
    return f"{key[0]!r} of {key[1]!r}" if key[1] else repr(key[0])
