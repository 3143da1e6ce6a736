"""Batches of data of any form, and messages about a batch that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from packprop.applications.dataset.describing import Describer
from packprop.applications.dataset.digests import bytes_digest, spot_check
from packprop.applications.dataset.messages import described, explanation, has_tensors
from packprop.applications.dataset.ranks import Ranks
from packprop.applications.dataset.sources import (
    GLOBAL,
    Drawing,
    Given,
    Numbers,
    Samples,
    drawing_from,
    generator_of_data,
    source_of,
    unless_drawn,
)
from packprop.engine.tensors import LABELS, Apart, inputs_and_targets
from packprop.errors import BadInput, PackpropError

Inputs = Tensor | tuple[Tensor, ...] | list[Tensor] | Mapping[str, Tensor]
"""Inputs of a model that takes one tensor, or several."""

Data = Dataset[Any] | tuple[Inputs, Tensor] | Iterable[Any]
"""Data of any form."""

END = object()
"""Stands for a batch when none is left."""


class Batches:
    """Readings of data of any form; it knows the current batch, so that messages can describe it.

    Args:
        asked: The call of the user, for messages.
        data: A ``Dataset`` of pairs, tensors ``(inputs [n, ...], targets [n, ...])``, where inputs may be a
            tuple or a mapping of tensors, or batches ``(inputs, targets)``, or of objects, such as a
            ``DataLoader``.
        batch_size: Samples in a batch, 128 if ``None``; only for data that come sample by sample.
        whole: True if the model takes whole batches, and computes the loss itself.

    Attributes:
        count: Batches of this reading so far.
        ended: True if this reading has come to its end.
        looks_ahead: True if the data have been asked for a batch that is not taken, or not there yet.
        current: The current batch, as the data yielded it, or one of another rank; messages name it.
        watched: True to update ``digest``, which shows if another reading yields other batches.
        digest: A digest of the batches of this reading so far, if they are watched.

    Raises:
        BadInput: For data of another form; while iterating, for a batch of another form.
    """

    def __init__(self, asked: str, data: Any, batch_size: int | None = None, whole: bool = False) -> None:
        self.asked, self.count, self.ended, self._whole = asked, 0, False, whole
        self.watched, self.digest = False, ""
        self.current: Any = None
        self._first: list[Any] = []
        self.looks_ahead = False
        self.source = source_of(asked, data, batch_size, whole)
        self._rest: Iterator[Any] | None = None
        self._rank, self._world = 0, 1
        self._draws = generator_of_data()
        self._generators: list[Drawing] = [self._draws, *self.source.generators(), *GLOBAL]
        self._start: list[Tensor] = []

    def __length_hint__(self) -> int:
        return max(0, len(self.source) - self.count)

    def facts(self) -> dict[str, Any]:
        """Return facts that tell these data from others, without reading them all."""
        return self.source.facts()

    def described(self, describer: Describer) -> dict[str, Any]:
        """Describe the code that reads the data, and some samples; keep the states of generators in them."""
        found = self.source.described(describer)
        self.keep_generators(describer.generators)
        return found

    def keep_generators(self, generators: Iterable[Any]) -> None:
        """Keep the states of a run's generators with each place in the data."""
        known = {id(kept.source if isinstance(kept, Numbers) else kept) for kept in self._generators}
        for each in generators:
            if id(each) in known:
                continue
            known.add(id(each))
            self._generators.append(each if isinstance(each, torch.Generator) else Numbers(each))
            if self._start:  # the run has looked at a batch before
                self._start.append(self._generators[-1].get_state())

    def left(self) -> int:
        """Return the number of batches to come; if it is unknown, the number of batches so far."""
        return self.__length_hint__() if len(self.source) else self.count

    def require_rereadable(
        self, what: str, why: str, instead: str = "give a list of batches, a data loader, a Dataset or tensors"
    ) -> None:
        """Refuse data that can be read only once.

        Args:
            what: The name of the data in the message.
            why: The reason why they are read again.
            instead: What to do.

        Raises:
            BadInput: If there can be no second reading.
        """
        if self.source.is_read_once:
            where = f"{what} {described(self.source.data)}"
            raise BadInput(self.asked, where, f"{why}, and these data can be read once", instead)

    def first(self) -> tuple[Any, Any] | None:
        """Return the next batch; iteration still begins with it. Return ``None`` at the end of a reading.

        Raises:
            BadInput: If the data hold no batch; on one of several ranks, ``first`` returns ``None`` then.
        """
        if not self._first:
            batch = self._next()
            if batch is END and not self.count and self._world == 1:
                raise BadInput(self.asked, "data", "it held no batch", "give at least one batch")
            if batch is END:
                return None
            self._first.append(batch)
        return self._checked(self._first[0])

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        self.first()
        while (batch := self._next()) is not END:
            self._taken(batch)
            yield self._checked(batch)
            self.current = None

    def share(self, ranks: Ranks) -> None:
        """Divide samples with indices among the ranks, batch by batch; other batches are each rank's own."""
        if ranks.world == 1:
            return
        self._rank, self._world = ranks.rank, ranks.world
        if not self.source.is_read_once:
            self.begin_again()  # the run may have looked at a batch
        self._start = []
        self._draws.set_state(ranks.derived(self._draws.get_state()))

    def begin_again(self) -> None:
        """Begin another reading with the next batch; it draws the same numbers as the last one."""
        self._draw_from(self._start_or_now)
        self.count, self.digest, self.ended = 0, "", False
        self._rest = None
        self._first.clear()

    @contextlib.contextmanager
    def drawing_apart(self) -> Iterator[None]:
        """Let a reading draw inside; afterwards it is as if nothing had been drawn."""
        before = self.states
        try:
            yield
        finally:
            self._draw_from(before)

    @property
    def _start_or_now(self) -> list[Tensor]:
        """Return the random states that a reading begins with."""
        return [*self._start] or self.states

    @property
    def states(self) -> list[Tensor]:
        """States of the generators that the data draw from; the first stands for the global one of torch."""
        return [generator.get_state() for generator in self._generators]

    def _draw_from(self, states: Iterable[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)

    def end_at(self, place: Mapping[str, Any], number: int) -> None:
        """Restore the place of a complete run of ``number`` batches."""
        self.count, self.digest, self._start = number, place["digest"], place["start"]
        self._draw_from(place["generators"])

    def leave_undrawn(self, before: Sequence[Tensor]) -> None:
        """Restore the states ``before`` of generators that no reading has drawn from."""
        states = zip(before, self._start_or_now, self.states, strict=False)
        self._draw_from(unless_drawn(*each) for each in states)

    def place(self) -> dict[str, Any]:
        """Return the place of this reading, in values that a file can hold; beside the loader's own state.

        Before the first batch is taken, this is the start, even if the run has looked at the batch.
        """
        start = self._start_or_now
        now = self.states if self.count else start
        return {"batches": self.count, "digest": self.digest, "start": start, "generators": now}

    @property
    def is_placed(self) -> bool:
        """Tell whether a reading continues at its place, without reading earlier batches again."""
        return self.source.has_state or isinstance(self.source, Samples)

    def loader_state(self) -> Any:
        """Return the loader's own position; ``None`` before its first batch, when it may be out of date."""
        if not self.source.has_state or not self.count or self.ended:
            return None
        with drawing_from(self._draws):
            return self.source.data.state_dict()  # type: ignore[union-attr]  # looked at by has_state

    def go_to(self, place: Mapping[str, Any], number: int) -> None:
        """Continue from a place, with its random states; all ranks together have done ``number`` batches.

        From a loader without a state, packprop reads the batches up to the place again, and compares them.

        Raises:
            BadInput: If these batches differ from the earlier ones.
        """
        source = self.source
        if place["ended"]:
            self._start, self._rest, self.ended = place["start"], iter(()), True
            self._first.clear()
        elif not place["batches"] and not number:
            if source.is_read_once and self._rest is not None:
                return  # the run has looked at its first batch, which will not come again
            self._start = place["start"]
            self.begin_again()
        elif isinstance(source, Given) and place["loader"] is None:
            self._read_up_to(place)
        else:
            self._start = place["start"]
            self._first.clear()
            if isinstance(source, Given):
                with drawing_from(self._draws):
                    source.data.load_state_dict(place["loader"])  # type: ignore[attr-defined]  # as it had one
            self._open(number)
        self.count, self.digest, self.current = place["batches"], place["digest"], None
        self._draw_from(place["generators"])

    def _read_up_to(self, place: Mapping[str, Any]) -> None:
        """Read batches again, and compare them with the earlier ones."""
        known = place["batches"]
        if not self.source.is_read_once:
            self._start = place["start"]
            self.begin_again()
        while self.count < known and (batch := self._next()) is not END:
            self._taken(batch)
        fewer = f"they hold {self.count} batches only" if self.count < known else None
        if fewer or self.digest != place["digest"]:
            raise BadInput(
                self.asked,
                f"the data, of which {known} batches had been read",
                fewer or "their first batches differ from those, or come in another order",
                "give the same data in the same order, or begin again with a StatefulDataLoader or a Dataset, "
                "which packprop does not read again",
            )

    def _open(self, begin: int) -> None:
        self.ended = False
        self._start = self._start_or_now
        with self._reading():
            self._rest = self.source.open(begin, self._rank, self._world)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Let the data draw their own random numbers inside, and report errors as those of the data."""
        try:
            with drawing_from(self._draws):
                yield
        except PackpropError:
            raise
        except Exception as error:
            where = f"the data, after {self.count} batches"
            instead = "check that you can iterate over the data without packprop"
            if isinstance(self.source, Samples):
                instead += "; give samples that PyTorch cannot collate as batches of a loader that can"
            raise BadInput(self.asked, where, explanation(error), instead) from error

    def _next(self) -> Any:
        if self._first:
            return self._first.pop()
        if self._rest is None:
            self._open(0)
        assert self._rest is not None
        self.looks_ahead = True
        with self._reading():
            batch = next(self._rest, END)
        self.ended = batch is END
        self.looks_ahead = not self.ended
        return batch

    def _taken(self, batch: Any) -> None:
        self.current = batch
        self.count += 1
        self.looks_ahead = False
        if self.watched and isinstance(self.source, Given):
            self.digest = bytes_digest((self.digest + spot_check(batch)).encode())  # of all, in their order

    def _checked(self, batch: Any) -> tuple[Any, Any]:
        self.current = batch
        split = inputs_and_targets(batch, self._whole)
        if split is not None and (isinstance(split[0], Apart) or has_tensors(split[0])):
            return split
        where = f"batch {max(self.count, 1)} of the data, {described(batch)}"
        if self._whole:
            instead = "let the data yield what the model takes: tensors, by name or in order, or an object"
            raise BadInput(self.asked, where, "it is neither tensors nor an object", instead)
        raise BadInput(
            self.asked,
            where,
            "it is not a pair (inputs, targets) with tensors as inputs, nor an object",
            "let the data yield such pairs; inputs may be a tuple or a mapping of arguments. Or let them yield "
            f"mappings with the targets as {LABELS!r}, or objects that the model and the loss take whole; or "
            "give loss=None if the model has it",
        )

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Name the current batch in any exception from inside; leave exceptions between batches alone.

        Raises:
            BadInput: In place of any exception that is not packprop's own.
        """
        try:
            yield
        except PackpropError:
            raise
        except Exception as error:
            if self.current is None:
                raise
            where = f"batch {max(self.count, 1)} of the data, {described(self.current)}"
            called = "the model" if self._whole else "loss(model(inputs), targets)"
            instead = f"check that {called} works for every batch"
            if isinstance(error, torch.OutOfMemoryError):
                instead = "use smaller batches"
            raise BadInput(self.asked, where, explanation(error), instead) from error
