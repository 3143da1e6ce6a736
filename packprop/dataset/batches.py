"""Batches of data of any form, and what messages say about a batch that fails."""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from packprop.errors import BadInput, PackpropError
from packprop.tensors.calling import LABELS, inputs_and_targets
from packprop.tensors.nesting import tensors_in

Data = Dataset[Any] | tuple[Tensor, Tensor] | Iterable[tuple[Any, Any]]


BATCH_SIZE = 128
"""Samples in a batch where the data come sample by sample."""


class Batches:
    """One pass over data of any form; it knows the current batch, so that messages can describe it.

    Args:
        asked: What the user asked for, for messages.
        data: A ``Dataset`` of pairs, a tuple of tensors ``(inputs [n, ...], targets [n, ...])``, or
            batches ``(inputs, targets)`` such as a ``DataLoader``.
        batch_size: Samples in a batch, 128 if ``None``; only for data that come sample by sample.
        whole: Whether the model takes whole batches, and computes the loss itself.

    Raises:
        BadInput: For data of another form; while iterating, for a batch of another form.
    """

    def __init__(self, asked: str, data: Any, batch_size: int | None = None, whole: bool = False) -> None:
        self.asked, self.count, self._whole = asked, 0, whole
        self._current: Any = None
        self._first: list[Any] = []
        if isinstance(data, (tuple, list)) and data and all(isinstance(x, Tensor) for x in data):
            sizes = {len(x) if x.dim() else 0 for x in data}
            if len(sizes) != 1 or (len(data) != 2 and not whole):
                raise BadInput(
                    asked,
                    f"data, tensors {shapes(data)}",
                    "they are not a pair whose first axes hold the same number of samples",
                    "give a tensor of inputs [n, ...] and a tensor of targets [n, ...]",
                )
            data = TensorDataset(*data)
        if isinstance(data, TensorDataset) and (whole or len(data.tensors) == 2):
            step = batch_size or BATCH_SIZE
            data = list(zip(*(tensor.split(step) for tensor in data.tensors), strict=True))
        elif isinstance(data, Dataset):
            data = DataLoader(data, batch_size or BATCH_SIZE)
        elif isinstance(data, Mapping):
            raise BadInput(
                asked,
                f"data {described(data)}",
                "a mapping is one batch, not data that batches are taken from",
                "give a list of batches, [batch], a data loader or a Dataset",
            )
        elif not isinstance(data, Iterable):
            raise BadInput(
                asked,
                f"data {described(data)}",
                "it is neither a data set nor can it be iterated over",
                "give a Dataset, a pair of tensors, or batches (inputs, targets)",
            )
        elif batch_size is not None:
            raise BadInput(
                asked,
                f"batch_size={batch_size} with data {described(data)}",
                "these data come in batches already",
                "leave the batch size out, or give a Dataset or a pair of tensors",
            )
        self._hint = len(data) if isinstance(data, Sized) else 0
        self._rest = iter(data)

    def __length_hint__(self) -> int:
        return self._hint

    def first(self) -> tuple[Any, Any]:
        """The first batch; iteration begins with it all the same."""
        if not self._first:
            batch = next(self._rest, None)
            if batch is None:
                raise BadInput(self.asked, "data", "it held no batch", "give at least one batch")
            self._first.append(batch)
        return self._checked(self._first[0])

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        self.first()
        for batch in itertools.chain(self._first, self._rest):
            self.count += 1
            yield self._checked(batch)
            self._current = None

    def _checked(self, batch: Any) -> tuple[Any, Any]:
        self._current = batch
        split = inputs_and_targets(batch, self._whole)
        if split is not None and _has_tensors(split[0]):
            return split
        where = f"batch {max(self.count, 1)} of the data, {described(batch)}"
        if self._whole:
            instead = "let the data yield what the model takes: tensors, by name or in order"
            raise BadInput(self.asked, where, "it holds no tensors", instead)
        raise BadInput(
            self.asked,
            where,
            "it is not a pair (inputs, targets) with tensors as inputs",
            "let the data yield such pairs; inputs may be a tuple or a mapping of arguments. Or let them yield "
            f"mappings with the targets as {LABELS!r}; or give loss=None if the model computes the loss",
        )

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Name the batch that was worked on in any exception from inside.

        Raises:
            BadInput: From any exception that is not packprop's own.
        """
        try:
            yield
        except PackpropError:
            raise
        except Exception as error:
            where = f"batch {max(self.count, 1)} of the data, {described(self._current)}"
            called = "the model" if self._whole else "loss(model(inputs), targets)"
            instead = f"see that {called} works for every batch"
            if self._current is None:
                where = f"the data, after {self.count} batches"
                instead = "see that the data can be iterated over on their own"
            elif isinstance(error, torch.OutOfMemoryError):
                instead = "use smaller batches"
            raise BadInput(self.asked, where, explanation(error), instead) from error


def explanation(error: BaseException) -> str:
    """Type and message of an exception, and the last place outside of torch and packprop on its way."""
    frames = traceback.extract_tb(error.__traceback__)
    packages = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
    own = [frame for frame in frames if not frame.filename.startswith(packages)]
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if not own or isinstance(error, SyntaxError):  # whose message says where it is
        return message
    return f"{message} ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})"


def described(value: Any) -> str:
    """What a value is, for messages: its type, and shapes where it holds tensors."""
    if isinstance(value, Tensor):
        return f"a tensor {shapes(value)}"
    if isinstance(value, (tuple, list)) and len(value) == 2 and _has_tensors(value):
        return f"inputs {shapes(value[0])}, targets {shapes(value[1])}"
    kind = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    return f"{kind} of tensors {shapes(value)}" if _has_tensors(value) else kind


def shapes(value: Any) -> str:
    """Shapes and types of the tensors in nested tuples, lists and dictionaries."""
    texts = [f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors_in(value)]
    return " and ".join(texts) if texts else f"of type {type(value).__name__}"


def _has_tensors(value: Any) -> bool:
    return next(tensors_in(value), None) is not None
