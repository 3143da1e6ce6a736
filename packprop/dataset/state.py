"""Results of the batches so far, merged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from packprop.algebra.monoid import KEEP, SUM, Moments, Monoid, lift, nothing_like, rescale
from packprop.dataset.parts import Part, needs_second_reading
from packprop.dataset.result import Result, Value
from packprop.engine.saving import warn_of_skipped
from packprop.errors import PackpropError
from packprop.tensors.long_work import doing, expect
from packprop.tensors.nesting import map_tensors, tensors_in
from packprop.tensors.precision import accumulation_dtype, wider_dtype
from packprop.types import Extension

Key = tuple[int, int, str]
"""Places of the extension and of its row, and the name of the parameter."""


@dataclass
class MergedResults:
    """Merged partial results of the batches so far, as if the loss were a sum over terms.

    Sums and moments are merged in float64 where the device has it: over millions of samples those in float32
    lose digits.

    Args:
        extensions: What is computed.
        partial: Merged results by extension, row and parameter name.
        rotations: What the first reading led to, by extension and parameter name; see NOTE [Second reading].
        dtypes: Precision of each parameter.
        reached: For each parameter the number of samples that depend on it.
        samples: Samples so far.
        terms: Terms of the loss so far, under a mean; under a sum what the loss is divided by.
        loss: The sum of all terms.
        reduction: How the loss is reduced.
        whole: Whether no batch is half merged; whoever adds batches says so when one is.
        again: Samples and terms so far of a second reading.
    """

    extensions: Sequence[Extension]
    partial: dict[Key, Any] = field(default_factory=dict)
    rotations: dict[tuple[int, str], list[Any]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    reached: dict[str, int] = field(default_factory=dict)
    samples: int = 0
    terms: float = 0.0
    loss: Tensor | float = 0.0
    reduction: str = ""
    whole: bool = True
    again: list[float] = field(default_factory=lambda: [0, 0.0])

    def count(self, samples: int, terms: float, loss: Tensor, reduction: str) -> None:
        """Count a batch whose results were added.

        Where samples have results of their own, every batch must use each parameter.
        """
        if self.reduction not in ("", reduction):
            raise PackpropError(
                "Quantities of a loss over several batches were asked for.",
                f"a loss that reduces by {self.reduction}, then by {reduction}",
                "there is no one loss over all samples that they are parts of",
                "use the same loss for every batch",
            )
        self.reduction = reduction
        self.samples += samples
        self.terms = self.terms + terms if reduction == "mean" else terms
        if terms:
            self.loss = self.loss + _widened(loss.to(accumulation_dtype(loss.dtype))) * terms
        whole = [e.name for e in self.extensions if any(row.over_n not in (SUM, KEEP) for row in e.rows)]
        for name, reached in self.reached.items():
            if whole and reached != self.samples:
                raise PackpropError(
                    f"{whole[0]} over several batches was asked for.",
                    f"parameter {name!r}",
                    f"the loss depends on it for {reached} of the first {self.samples} samples "
                    "only: which of its rows belongs to which sample is not known",
                    "give data for which the model uses the same parameters in every batch, or "
                    "set requires_grad=False on this one",
                )

    def count_again(self, samples: int, terms: float) -> None:
        """Count a batch of a second reading, whose results were added."""
        self.again = [self.again[0] + samples, self.again[1] + terms if self.reduction == "mean" else terms]

    def end_second_reading(self) -> None:
        """Refuse a second reading of other data.

        Raises:
            PackpropError: If it had another number of samples, or of terms.
        """
        if self.again != [self.samples, self.terms]:
            names = [extension.name for extension in self.extensions if needs_second_reading(extension)]
            raise PackpropError(
                f"{names[0]} over a data set was asked for, which reads it twice.",
                "the second reading of the data",
                f"it brought {self.again[0]} samples and {self.again[1]:g} terms of the loss, the first one "
                f"{self.samples} and {self.terms:g}",
                "give data that are the same each time they are read",
            )

    def add(
        self,
        name: str,
        dtype: torch.dtype,
        samples: int,
        terms: float,
        results: Mapping[Part, list[Any]],
    ) -> None:
        """Merge the results of one parameter and one batch, whose loss was divided by ``terms``."""
        self.whole = False
        self.dtypes[name] = dtype
        if results:
            self.reached[name] = self.reached.get(name, 0) + samples
        for position, extension in enumerate(self.extensions):
            for part, values in results.items():
                if part.whole is extension:
                    for index, value in zip(part.places, values, strict=True):
                        self._add_row((position, index, name), value, terms)

    def _add_row(self, key: Key, value: Any, terms: float) -> None:
        """Merge the result of one row."""
        position, index, name = key
        extension = self.extensions[position]
        row = extension.rows[index]
        if value is None:
            return
        if row.degree and not terms:  # a mean over no terms: NaN times 0 shall be 0
            value = nothing_like(value)
        partial = lift(row.over_n, rescale(value, terms, row.degree))
        before = self.partial.get(key)
        if before is None:
            self.partial[key] = _begun(row.over_n, partial)
            return
        if row.over_n.axis is not None:
            _require_same_rows(extension, name, row.over_n.axis, [before[-1], *partial])
        if row.over_n is SUM and isinstance(before, Tensor) and before.shape == partial.shape:
            before.add_(partial)
        else:
            self.partial[key] = row.over_n.merge(before, partial)

    def end_first_reading(self) -> None:
        """Turn the results of first passes into what second passes are given."""
        self.whole = False
        keys = self._of_first_passes()
        sizes = {key: sum(len(t) ** 3 for t in tensors_in(self._rows(*key)) if t.dim() == 2) for key in keys}
        expect("eigenvectors", sum(sizes.values()))
        for position, name in keys:
            extension = self.extensions[position]
            last = extension.rows[-1]
            assert last.after is not None
            with doing("eigenvectors", sizes[position, name]):
                made = last.after(self._rows(position, name))
            # in the layout that a file has: products are rounded as it is
            self.rotations[position, name] = map_tensors(Tensor.contiguous, made)
            for index in range(len(extension.rows) - 1):
                self.partial.pop((position, index, name), None)

    def _of_first_passes(self) -> list[tuple[int, str]]:
        """Extensions that go over the samples twice, and the parameters that they have results for."""
        found = [(position, name) for position, _, name in self.partial]
        return [key for key in dict.fromkeys(found) if needs_second_reading(self.extensions[key[0]])]

    def _rows(self, position: int, name: str) -> list[Any]:
        """The results of an extension's first rows, scaled and rounded as one pass would have them."""
        dtype = accumulation_dtype(self.dtypes[name])
        results = []
        for index, row in enumerate(self.extensions[position].rows[:-1]):
            value = self.partial.get((position, index, name))
            value = None if value is None else row.over_n.result(value)
            results.append(map_tensors(methodcaller("to", dtype), rescale(value, self._scale, row.degree)))
        return results

    def known(self, name: str, extension: Extension) -> list[Any]:
        """What a second pass is given.

        Raises:
            PackpropError: If the parameter was used in no batch of the first reading.
        """
        known = self.rotations.get((self.extensions.index(extension), name))
        if known is None:
            raise PackpropError(
                f"{extension.name} over a data set was asked for, which reads it twice.",
                f"parameter {name!r}",
                "the loss depends on it in the second reading only",
                "give data that are the same each time they are read",
            )
        return known

    @property
    def _scale(self) -> float:
        return 1 / self.terms if self.terms else math.nan

    def result(self) -> Result:
        """Values of the loss over all samples so far; the partial results are gone then."""
        values: dict[str, dict[str, Value]] = {}
        names = list(dict.fromkeys(name for _, _, name in self.partial))
        for position, extension in enumerate(self.extensions):
            by_name = values.setdefault(extension.savefield, {})
            skipped: list[str] = []
            for name in names:
                rows = list(self.rotations.get((position, name), []))
                for index in range(len(rows), len(extension.rows)):
                    row = extension.rows[index]
                    partial = self.partial.pop((position, index, name), None)
                    value = None if partial is None else row.over_n.result(partial)
                    rows.append(rescale(value, self._scale, row.degree))
                if rows[-1] is None and all(row is None for row in rows):
                    continue
                value = extension.finish(rows, self.samples)
                if value is None:
                    skipped.append(name)
                else:
                    dtype = extension.dtype_of(self.dtypes[name])
                    by_name[name] = map_tensors(methodcaller("to", dtype), value)
            if skipped:
                warn_of_skipped(extension, skipped)
        return Result(values, self.samples, float(self.loss) * self._scale, self.reduction)

    def saved(self) -> dict[str, Any]:
        """Everything but what grows with the data, in values that files can hold."""
        return {
            "partial": [[*key, value] for key, value in self.partial.items() if not self.grows(key)],
            "rotations": [[*key, value] for key, value in self.rotations.items()],
            "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in self.dtypes.items()},
            "reached": dict(self.reached),
            "samples": self.samples,
            "terms": self.terms,
            "loss": self.loss,
            "reduction": self.reduction,
            "again": self.again,
        }

    def restore(self, saved: Mapping[str, Any], pieces: Iterable[tuple[Key, Tensor]]) -> None:
        """Take up what ``saved`` returned, and the ``pieces`` of what grows, in their order."""
        self.partial = {(position, index, name): value for position, index, name, value in saved["partial"]}
        for key, piece in pieces:
            self.partial.setdefault(key, []).append(piece)
        self.rotations = {(position, name): value for position, name, value in saved["rotations"]}
        self.dtypes = {name: getattr(torch, dtype) for name, dtype in saved["dtypes"].items()}
        self.reached = dict(saved["reached"])
        self.samples, self.terms = saved["samples"], saved["terms"]
        self.loss, self.reduction, self.again = saved["loss"], saved["reduction"], saved["again"]

    def grows(self, key: Key) -> bool:
        """Whether a result grows with the data; it is a list of pieces then."""
        return self.extensions[key[0]].rows[key[1]].over_n.grows


def _begun(monoid: Monoid, partial: Any) -> Any:
    """The first partial result, in memory of its own and with more digits where others will be added to it."""
    if monoid.grows or monoid is KEEP:
        return partial
    if monoid is SUM and isinstance(partial, Tensor):
        wide = wider_dtype(partial.dtype, partial.device.type) or partial.dtype
        return partial.to(wide, copy=True)
    if isinstance(partial, Moments):
        return Moments(partial.samples, _widened(partial.mean), _widened(partial.deviation))
    return partial


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(wider_dtype(tensor.dtype, tensor.device.type) or tensor.dtype)


def _require_same_rows(extension: Extension, name: str, axis: int, pieces: Sequence[Tensor]) -> None:
    """Refuse pieces that cannot be joined along an axis: batches of other numbers of tokens."""
    shapes = [[*piece.shape[:axis], *piece.shape[axis + 1 :]] for piece in pieces]
    if any(shape != shapes[0] for shape in shapes):
        raise PackpropError(
            f"{extension.name} over several batches was asked for.",
            f"parameter {name!r}",
            f"its samples have values of shapes {', '.join(map(str, shapes))} in two batches, as those of "
            "sequences of other lengths",
            "fill all batches up to one length, with targets that are ignored",
        )
