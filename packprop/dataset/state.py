"""Results of the batches so far, merged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from packprop.algebra.monoid import SUM, Moments, lift, rescale
from packprop.dataset.result import Result, Value
from packprop.engine.saving import warn_of_skipped
from packprop.errors import PackpropError
from packprop.tensors.nesting import map_tensors
from packprop.tensors.precision import accumulation_dtype
from packprop.types import Extension


@dataclass
class MergedResults:
    """Merged partial results of the batches so far, as if the loss were a sum over terms.

    Args:
        extensions: What is computed.
        partial: Merged results by extension, row and parameter name.
        dtypes: Precision of each parameter.
        reached: For each parameter the number of samples that depend on it.
        samples: Samples so far.
        terms: Terms of the loss so far, under a mean; under a sum what the loss is divided by.
        loss: The sum of all terms.
        reduction: How the loss is reduced.
    """

    extensions: Sequence[Extension]
    partial: dict[tuple[int, int, str], Any] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    reached: dict[str, int] = field(default_factory=dict)
    samples: int = 0
    terms: float = 0.0
    loss: Tensor | float = 0.0
    reduction: str = ""

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
            self.loss = self.loss + loss.to(accumulation_dtype(loss.dtype)) * terms
        whole = [e.name for e in self.extensions if any(row.over_n is not SUM for row in e.rows)]
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

    def add(
        self,
        name: str,
        dtype: torch.dtype,
        samples: int,
        terms: float,
        results: dict[Extension, list[Any]],
    ) -> None:
        """Merge the results of one parameter and one batch, whose loss was divided by ``terms``."""
        self.dtypes[name] = dtype
        if results:
            self.reached[name] = self.reached.get(name, 0) + samples
        for position, extension in enumerate(self.extensions):
            for index, (row, value) in enumerate(zip(extension.rows, results.get(extension, []), strict=False)):
                if value is None:
                    continue
                key = (position, index, name)
                if row.degree and not terms:  # a mean over no terms: NaN times 0 shall be 0
                    value = nothing_like(value)
                partial = lift(row.over_n, rescale(value, terms, row.degree))
                before = self.partial.get(key)
                if before is not None and row.over_n.axis is not None:
                    _require_same_rows(extension, name, row.over_n.axis, [before[-1], *partial])
                self.partial[key] = partial if before is None else row.over_n.merge(before, partial)

    def result(self) -> Result:
        """Values of the loss over all samples so far."""
        values: dict[str, dict[str, Value]] = {}
        scale = 1 / self.terms if self.terms else math.nan
        names = list(dict.fromkeys(name for _, _, name in self.partial))
        for position, extension in enumerate(self.extensions):
            by_name = values.setdefault(extension.savefield, {})
            skipped: list[str] = []
            for name in names:
                rows = []
                for index, row in enumerate(extension.rows):
                    partial = self.partial.get((position, index, name))
                    value = None if partial is None else row.over_n.result(partial)
                    rows.append(rescale(value, scale, row.degree))
                if all(row is None for row in rows):
                    continue
                value = extension.finish(rows, self.samples)
                if value is None:
                    skipped.append(name)
                else:
                    dtype = extension.dtype_of(self.dtypes[name])
                    by_name[name] = map_tensors(methodcaller("to", dtype), value)
            if skipped:
                warn_of_skipped(extension, skipped)
        return Result(values, self.samples, float(self.loss) * scale, self.reduction)


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


def nothing_like(value: Any) -> Any:
    """Zeros in place of all sums; the number of samples stays."""
    if isinstance(value, Moments):
        return Moments(value.samples, torch.zeros_like(value.mean), torch.zeros_like(value.mean))
    return map_tensors(torch.zeros_like, value)
