"""Results of the batches so far, merged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor

from packprop.applications.dataset.loss_terms import TermWeights, require_same_weights, two_reductions
from packprop.applications.dataset.parts import Part, needs_second_reading
from packprop.applications.dataset.ranks import Ranks
from packprop.applications.dataset.result import Result, Value
from packprop.applications.dataset.sums import merged_with, widened
from packprop.engine.algebra import KEEP, SUM, Monoid, lift, nothing_like, rescale
from packprop.engine.passes import warn_of_skipped
from packprop.engine.tensors import accumulation_dtype, doing, expect, map_tensors, tensors_in
from packprop.errors import PackpropError, naming
from packprop.types import Extension

Key = tuple[int, int, str]
"""Places of the extension and of its row, and the name of the parameter."""


PLAIN = ("reached", "samples", "terms", "loss", "reduction", "again", "batches")
"""Names of the counts that files hold unchanged."""


@dataclass(kw_only=True)
class Counts:
    """Numbers of the batches so far, as if the loss were a sum over terms.

    Args:
        dtypes: Precision of each parameter.
        reached: For each parameter the number of samples that depend on it.
        samples: Samples so far.
        terms: Terms of the loss so far, under a mean; under a sum the divisor of the loss.
        loss: The sum of all terms.
        reduction: The reduction of the loss.
        weights: The weights of terms in the losses of batches.
        again: Samples and terms so far of a second reading.
        batches: If results grow with the data: the number of each batch among those of all ranks, and the
            number of its samples. Each such result has one piece for each batch.
    """

    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    reached: dict[str, int] = field(default_factory=dict)
    samples: int = 0
    terms: float = 0.0
    loss: Tensor | float = 0.0
    reduction: str = ""
    weights: TermWeights = field(default_factory=TermWeights)
    again: list[float] = field(default_factory=lambda: [0, 0.0])
    batches: list[tuple[int, int]] = field(default_factory=list)

    @property
    def counts(self) -> Counts:
        """These numbers alone, on the CPU."""
        found = {each.name: getattr(self, each.name) for each in fields(Counts)}
        return Counts(**{**found, "loss": float(self.loss)})

    @property
    def scale(self) -> float:
        """The factor that turns the sum over terms into the loss."""
        return 1 / self.terms if self.terms else math.nan


def counted_together(counts: Sequence[Counts]) -> Counts:
    """Return the numbers of the batches of all these ranks together.

    Raises:
        PackpropError: If their losses are not parts of one loss.
    """
    require_same_weights([each.weights for each in counts])
    begun = [each for each in counts if each.reduction]
    reductions = sorted({each.reduction for each in begun})
    if len(reductions) > 1:
        raise two_reductions(*reductions)

    def all_terms(terms: Sequence[float]) -> float:
        return sum(terms) if reductions == ["mean"] else max(terms, default=0.0)

    reached = Counter[str]()
    for each in counts:
        reached.update(each.reached)
    return Counts(
        dtypes={name: dtype for each in counts for name, dtype in each.dtypes.items()},
        reached=dict(reached),
        samples=sum(each.samples for each in counts),
        terms=all_terms([each.terms for each in begun]),
        loss=sum(each.loss for each in counts),
        reduction=reductions[0] if reductions else "",
        weights=next((each.weights for each in counts if each.weights.own), TermWeights()),
        again=[sum(each.again[0] for each in counts), all_terms([each.again[1] for each in counts])],
        batches=sorted(batch for each in counts for batch in each.batches),
    )


@dataclass
class MergedResults(Counts):
    """Merged partial results of the batches so far, as if the loss were a sum over terms.

    packprop merges sums and moments in float64 if the device has it: in float32 they lose digits over millions
    of samples.

    Args:
        extensions: The extensions.
        partial: Merged results by extension, row and parameter name.
        rotations: Results of the first reading for the second, by extension and parameter name; see NOTE
            [Second reading].
        whole: False while a batch is half merged: ``add`` clears it, and the run sets it between two batches.
    """

    extensions: Sequence[Extension]
    partial: dict[Key, Any] = field(default_factory=dict)
    rotations: dict[tuple[int, str], list[Any]] = field(default_factory=dict)
    whole: bool = True

    def count(self, number: int, samples: int, terms: float, loss: Tensor, reduction: str) -> None:
        """Count a batch whose results were added, by its number among those of all ranks.

        Raises:
            PackpropError: If its loss and those before are not parts of one loss; if samples have results of
                their own, and the batch does not use a parameter that others use.
        """
        if self.reduction not in ("", reduction):
            raise two_reductions(self.reduction, reduction)
        self.reduction = reduction
        if self.samples:
            self.weights.require_any_size()
        self.samples += samples
        if any(row.over_n.grows for extension in self.extensions for row in extension.rows):
            self.batches.append((number, samples))
        self.terms = self.terms + terms if reduction == "mean" else terms
        if terms:
            self.loss = self.loss + widened(loss.to(accumulation_dtype(loss.dtype))) * terms
        self._require_reached()

    def settle_penalties(self) -> None:
        """Refuse penalties of several batches that differ or add up, if results contain them; else warn."""
        of_hessian = any(each.takes_hessian for each in self.extensions)
        self.weights.settle_penalties(self.reduction, of_hessian)

    def _require_reached(self) -> None:
        """Refuse parameters that some batches do not use, if results have rows for samples or count them."""
        whole = [e.name for e in self.extensions if any(row.over_n not in (SUM, KEEP) for row in e.rows)]
        for name, reached in self.reached.items():
            if whole and reached != self.samples:
                raise PackpropError(
                    f"{whole[0]} over several batches was asked for.",
                    f"parameter {name!r}",
                    f"the loss depends on it for {reached} of the first {self.samples} samples "
                    "only: packprop cannot tell which of its rows belongs to which sample",
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
        samples, terms = self.again
        if samples != self.samples or not math.isclose(terms, self.terms, rel_tol=1e-9):  # sums of weights
            names = [extension.name for extension in self.extensions if needs_second_reading(extension)]
            raise PackpropError(
                f"{names[0]} over a data set was asked for, which reads it twice.",
                "the second reading of the data",
                f"it had {self.again[0]} samples and {self.again[1]:g} terms of the loss, the first one had "
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
        row = self.extensions[key[0]].rows[key[1]]
        if value is None:
            return
        if row.degree and not terms:  # a mean over no terms is NaN, and adds nothing
            value = nothing_like(value)
        self._merge_row(key, lift(row.over_n, rescale(value, terms, row.degree)))

    def _merge_row(self, key: Key, partial: Any) -> None:
        """Merge a partial result of a batch with those before."""
        monoid, before = self.monoid_of(key), self.partial.get(key)
        if before is not None and monoid.axis is not None:
            _require_same_rows(self.extensions[key[0]], key[2], monoid.axis, [before[-1], *partial])
        self.partial[key] = merged_with(monoid, before, partial)

    def end_first_reading(self, ranks: Ranks) -> None:
        """Merge the results of first passes of all ranks, and turn them into the arguments of second passes.

        Each rank computes its share of the eigenvectors.
        """
        self.whole = False
        own = {key: self.partial.pop(key) for key in [*self.partial] if self._is_of_first_pass(key)}
        merged = dict(ranks.merged_in_turn(own, self.monoid_of))
        found = counted_together(ranks.each(self.counts))
        self.reduction = found.reduction
        keys = list(dict.fromkeys((position, name) for position, _, name in merged))
        rows = ranks.attempt(lambda: {key: self._first_rows(*key, merged, found) for key in keys})
        sizes = {key: sum(len(t) ** 3 for t in tensors_in(rows[key]) if t.dim() == 2) for key in keys}
        mine = [key for key, rank in _shared(sizes, ranks.world).items() if rank == ranks.rank]
        expect("eigenvectors", sum(sizes[key] for key in mine))

        def share() -> dict[tuple[int, str], Any]:
            made = {}
            for key in mine:
                after = self.extensions[key[0]].rows[-1].after
                assert after is not None
                with doing("eigenvectors", sizes[key]), naming(key[1]):
                    # contiguous, as read from a file: the layout decides how products round
                    made[key] = map_tensors(Tensor.contiguous, after(rows[key]))
            return made

        for each in ranks.each(ranks.attempt(share)):
            self.rotations |= each
        self.rotations = {key: self.rotations[key] for key in keys}

    def _is_of_first_pass(self, key: Key) -> bool:
        """Tell whether a result belongs to a row before a second pass."""
        extension = self.extensions[key[0]]
        return needs_second_reading(extension) and key[1] < len(extension.rows) - 1

    def _first_rows(self, position: int, name: str, merged: dict[Key, Any], counts: Counts) -> list[Any]:
        """Return the results of an extension's first rows, scaled and rounded as one pass would have them."""
        keys = [(position, index, name) for index in range(len(self.extensions[position].rows) - 1)]
        rounded = methodcaller("to", accumulation_dtype(counts.dtypes[name]))
        return [map_tensors(rounded, self._scaled_row(key, merged, counts.scale)) for key in keys]

    def _scaled_row(self, key: Key, partial: dict[Key, Any], scale: float) -> Any:
        """Remove the result of a row from the partial ones, and return it scaled; ``None`` if there is none."""
        row, value = self.extensions[key[0]].rows[key[1]], partial.pop(key, None)
        return rescale(None if value is None else row.over_n.result(value), scale, row.degree)

    def monoid_of(self, key: Key) -> Monoid:
        """Return the monoid that merges the partial results of a key."""
        return self.extensions[key[0]].rows[key[1]].over_n

    def end_pass(self, ranks: Ranks) -> None:
        """Do nothing; ``ShardedResults`` merges the results of a pass over all ranks."""

    def shards_kept(self) -> list[list[Any]]:
        """Return no parts; ``ShardedResults`` returns the parts of results that this rank keeps."""
        return []

    def of_all(self, ranks: Ranks) -> MergedResults:
        """Return the results of the batches of all ranks; leave those of this rank unchanged."""
        if ranks.world == 1:
            return replace(self, partial=dict(self.partial))
        told = ranks.each(self.counts)
        counts = counted_together(told)
        merged = dict(ranks.merged_in_turn(self.partial, self.monoid_of))
        found = replace(self, partial=merged, **vars(counts))
        if counts.samples > max(each.samples for each in told):
            found.settle_penalties()
        found._require_reached()
        sizes = [each.batches for each in told]
        for key, pieces in found.partial.items():
            if (axis := self.monoid_of(key).axis) is not None:
                found.partial[key] = _in_order(pieces, axis, sizes)
        return found

    def known(self, name: str, extension: Extension) -> list[Any]:
        """Return the argument of a second pass.

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

    def result(self) -> Result:
        """Return values of the loss over all samples so far; this consumes the partial results."""
        values: dict[str, dict[str, Value]] = {}
        names = list(dict.fromkeys(name for _, _, name in self.partial))
        for position, extension in enumerate(self.extensions):
            by_name = values.setdefault(extension.savefield, {})
            skipped: list[str] = []
            for name in names:
                rows = list(self.rotations.get((position, name), []))
                keys = [(position, index, name) for index in range(len(rows), len(extension.rows))]
                rows += [self._scaled_row(key, self.partial, self.scale) for key in keys]
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
        return Result(values, self.samples, float(self.loss) * self.scale, self.reduction)

    def saved(self) -> dict[str, Any]:
        """Return everything as values that files can hold, in the order of merging, which decides rounding."""
        return {
            "partial": [[*key, value] for key, value in self.partial.items()],
            "rotations": [[*key, value] for key, value in self.rotations.items()],
            "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in self.dtypes.items()},
            "weights": [*vars(self.weights).values()],
            **{name: getattr(self, name) for name in PLAIN},
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the values of ``saved``."""
        self.partial = {(position, index, name): value for position, index, name, value in saved["partial"]}
        self.rotations = {(position, name): value for position, name, value in saved["rotations"]}
        self.dtypes = {name: getattr(torch, dtype) for name, dtype in saved["dtypes"].items()}
        self.weights = TermWeights(*saved["weights"])
        for name in PLAIN:
            setattr(self, name, saved[name])

    def restore_what_is_shared(self, saved: Mapping[str, Any]) -> None:
        """Restore what all ranks share, on a rank that has not read any batch yet."""
        self.rotations = {(position, name): value for position, name, value in saved["rotations"]}
        self.reduction, self.weights = saved["reduction"], TermWeights(*saved["weights"])
        self.terms = saved["terms"] if self.reduction == "sum" else 0.0

    def grows(self, key: Key) -> bool:
        """Tell whether a result grows with the data; it is then a list of pieces."""
        return self.extensions[key[0]].rows[key[1]].over_n.grows


def _shared(sizes: Mapping[Any, float], ranks: int) -> dict[Any, int]:
    """Assign work to ranks: the largest piece first, each piece to the rank with the least work."""
    load, shared = [0.0] * ranks, {}
    for key, size in sorted(sizes.items(), key=lambda item: -item[1]):
        rank = load.index(min(load))
        shared[key] = rank
        load[rank] += size + 1
    return shared


def _in_order(
    pieces: Sequence[Tensor], axis: int, batches: Sequence[Sequence[tuple[int, int]]]
) -> list[Tensor]:
    """Return the pieces of ranks, one for each batch, in the order of all batches."""
    numbered: list[tuple[int, Tensor]] = []
    for piece, own in zip(pieces, batches, strict=True):
        parts = piece.split([samples for _, samples in own], axis) if own else ()
        numbered += zip([number for number, _ in own], parts, strict=True)
    return [piece for _, piece in sorted(numbered, key=itemgetter(0))]


def _require_same_rows(extension: Extension, name: str, axis: int, pieces: Sequence[Tensor]) -> None:
    """Refuse pieces that cannot be joined along an axis, such as those of sequences of different lengths."""
    shapes = [[*piece.shape[:axis], *piece.shape[axis + 1 :]] for piece in pieces]
    if any(shape != shapes[0] for shape in shapes):
        raise PackpropError(
            f"{extension.name} over several batches was asked for.",
            f"parameter {name!r}",
            f"its samples have values of shapes {', '.join(map(str, shapes))} in two batches, as sequences of "
            "different lengths have",
            "pad all batches to one length, with targets that are ignored",
        )
