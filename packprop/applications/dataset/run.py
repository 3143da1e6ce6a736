"""A run over a data set: its readings, its checkpoint, and its continuation."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from packprop.applications.dataset.batches import Batches
from packprop.applications.dataset.checkpoint import Checkpoint, Moment, Told
from packprop.applications.dataset.interrupts import interrupts_kept
from packprop.applications.dataset.joining import require_divided, take_up, take_up_others
from packprop.applications.dataset.messages import no_samples
from packprop.applications.dataset.parts import generators_of, readings_of
from packprop.applications.dataset.progress import progress_bar
from packprop.applications.dataset.rank_files import RankFiles
from packprop.applications.dataset.ranks import Ranks
from packprop.applications.dataset.result import Result
from packprop.applications.dataset.run_draws import RunDraws
from packprop.applications.dataset.saved import packed
from packprop.applications.dataset.sources import Samples
from packprop.applications.dataset.stream import BatchStream, ChunkSizesByBatch, is_empty
from packprop.errors import PackpropError


class Run:
    """One run over a data set.

    Args:
        batches: The data.
        stream: Runs batches, and merges their results.
        chunk_sizes: The chunk sizes of batches.
        ranks: The ranks of the run.
        checkpoint: The checkpoint of the run, if it has one; the first rank writes it.
        files: The files of ranks in it.
        progress: Show a bar.
        budget: The most bytes for tensors; ``None`` without a budget.
    """

    def __init__(
        self,
        batches: Batches,
        stream: BatchStream,
        chunk_sizes: ChunkSizesByBatch,
        ranks: Ranks,
        checkpoint: Checkpoint | None,
        files: RankFiles | None,
        progress: bool,
        budget: int | None = None,
    ) -> None:
        self._budget = budget
        self._batches, self._stream, self._chunk_sizes = batches, stream, chunk_sizes
        self._ranks, self._progress = ranks, progress
        self._checkpoint, self._files = checkpoint, files
        self._results = stream.step.merged
        self._readings = readings_of(stream.step.extensions)
        self._reading, self._is_complete = 0, False
        self._number, self._steps = 0, 0
        self._goes_on = False
        self._drawn_outside: list[Tensor] = []
        self._stand_in: Any = None  # a batch for passes in which other ranks need this one
        batches.share(ranks)
        batches.watched |= checkpoint is not None
        self._draws = RunDraws(generators_of(stream.step.extensions), ranks)
        self._note_moment()

    def go_on(self, told: Told, own: dict[str, Any] | None) -> None:
        """Restore the last checkpoint.

        Args:
            told: The part of it that all ranks get.
            own: The state of this rank; ``None`` on a rank that has not read any batch yet.

        Raises:
            BadInput: If another number of ranks wrote it, each with batches of its own.
        """
        self._goes_on = True
        place = self._own_place(told, own)
        self._reading, self._is_complete = told.facts["reading"], told.facts["complete"]
        self._number = told.facts["number"]
        take_up(self._results, own, told.shared, self._stream.device)
        assert self._files is not None
        if not self._ranks.rank and len(told.files) != self._ranks.world:
            take_up_others(self._results, self._files.in_turn(told.files[1:]), self._stream.device)
        self._chunk_sizes.restore(told.chunks if own is None else own["chunks"])
        self._draws.begin = place["begin"]
        self._drawn_outside = self._batches.states
        if self._is_complete:
            self._batches.end_at(place, self._number)
        else:
            self._batches.go_to(place, self._number)
        self._draws.set(place["now"])
        if self._stream.step.stored is not None:
            self._stream.step.stored.go_to(place["stored"])
        self._note_moment()

    def _own_place(self, told: Told, own: dict[str, Any] | None) -> dict[str, Any]:
        """Return the place of this rank; derive it from the first rank's if the number of ranks has changed."""
        if len(told.files) == self._ranks.world:
            assert own is not None
            return own["place"]  # type: ignore[no-any-return]  # a dictionary, as SavedRank declares
        require_divided(self._batches.source, len(told.files), self._ranks.world)
        own = dict(told.place)
        for name in ("start", "generators"):  # the data's draws come first
            draws, *others = own[name]
            own[name] = [self._ranks.derived(draws), *others]
        for name in ("begin", "now"):
            own[name] = self._draws.derived(own[name])
        return own

    def to_the_end(self) -> Result:
        """Run to the end; if that fails, write a checkpoint of the work so far.

        Raises:
            PackpropError: Of any kind; the message says what is kept.
        """
        try:
            with interrupts_kept() as raise_lost_interrupt, self._batches.explained():
                return self._work(raise_lost_interrupt)
        except BaseException as error:
            self._ranks.tell(error)
            if self._ranks.world > 1:
                self._draws.set(self._draws.before)
            elif self._results.whole:
                with contextlib.suppress(Exception):  # the first error says more
                    self._keep_what_is_lacking()
            kept = "" if self._checkpoint is None else self._checkpoint.kept
            if isinstance(error, PackpropError) and kept:
                raise _with(error, kept) from error.__cause__
            raise

    def _work(self, raise_lost_interrupt: Callable[[], None]) -> Result:
        if not self._is_complete:
            self._ranks.attempt(self._look_at_first)
            if self._stream.step.stored is not None and not self._goes_on:
                self._keep()  # no run could continue a store without a checkpoint
            self._read(raise_lost_interrupt)
            if self._reading == 0 and not sum(self._ranks.each(self._results.samples)):
                raise no_samples(self._batches.asked, "data")
            if len(self._readings) > 1 and self._reading == 0:
                self._turn_over()
                self._read(raise_lost_interrupt)
            self._is_complete = True
            self._note_moment()
            self._keep()
        found = self._results.of_all(self._ranks)
        if len(self._readings) > 1:
            found.end_second_reading()
        if self._ranks.world > 1:
            self._batches.count = self._said_batches(self._ranks.each(self._batches.count), self._number)
            self._draws.end_alike()
        elif self._goes_on:
            self._draws.leave_undrawn()
            self._batches.leave_undrawn(self._drawn_outside)
        return found.result()

    def _look_at_first(self) -> None:
        """Plan the first batch, so that a budget that is too small is refused before any work."""
        first = self._batches.first()
        if first is not None:
            self._chunk_sizes.of(first)

    def _turn_over(self) -> None:
        """End the first reading, and begin the second one."""
        self._results.end_first_reading(self._ranks)
        self._reading, self._number = 1, 0
        self._draws.set(self._draws.begin)
        self._ranks.attempt(self._batches.begin_again)
        self._note_moment()
        self._keep()

    def _read(self, raise_lost_interrupt: Callable[[], None]) -> None:
        """Read to the end of the current reading; see NOTE [In step]."""
        second = self._reading == 1
        said = "packprop, second reading" if second else "packprop"
        shown = self._progress and not self._ranks.rank
        self._ranks.in_step = True
        done, left = self._batches.count, operator.length_hint(self._batches)
        with progress_bar(said, done, left, self._budget, torch.device(self._stream.device), shown) as advance:
            for batch in self._with_the_others():
                self._take(batch)
                advance(int(self._results.again[0]) if second else self._results.samples)
                raise_lost_interrupt()
                self._end_step()
        self._ranks.in_step = False

    def _take(self, batch: Any) -> None:
        """Add one batch, or none if only other ranks have one."""
        if self._is_sharded:
            self._take_together(batch)
            self._begin_step(batch)
        else:
            self._begin_step(batch)
            if batch is not None:
                self._add(batch)
        self._steps += 1
        self._number += self._ranks.world
        self._note_moment()
        if self._steps == 1 and self._checkpoint is not None:
            packed(self._own_state())  # refuses values that no file can hold now, not after half a minute

    def _add(self, batch: Any, counts: bool = True) -> None:
        """Run a batch; the store identifies its samples by the batch as the data yielded it."""
        self._stream.step.batch = self._batches.current
        parts, number = self._readings[self._reading], self._number + self._ranks.rank
        self._stream.add(batch, self._chunk_sizes.of(batch), parts, self._reading == 1, number, counts)

    def _end_step(self) -> None:
        """Wait for the messages of the other ranks; write a checkpoint if it is due."""
        self._others_go_on, due = self._ranks.end_step()
        self._ranks.in_step = False
        if due:
            self._keep()
        self._ranks.in_step = self._others_go_on

    def _begin_step(self, batch: Any) -> None:
        """Tell the other ranks whether this one has a batch."""
        step = self._steps + 1
        self._ranks.begin_step(
            batch is not None, lambda: self._checkpoint is not None and self._checkpoint.due(step)
        )

    @property
    def _is_sharded(self) -> bool:
        """Tell whether all ranks go through every pass together; see NOTE [Sharded passes]."""
        return self._stream.step.sharded is not None

    def _take_together(self, batch: Any) -> None:
        """Run a pass on all ranks if any rank has samples for it."""
        has_any = batch is not None and not is_empty(batch)
        if not self._ranks.agree(has_any):
            return
        if self._stand_in is None:  # on all ranks at once: before the first samples of any rank
            self._ranks.in_step = False
            self._stand_in = self._ranks.given_to_all(batch if has_any else None)
            self._ranks.in_step = True  # until the end of the forward pass
        if not has_any:
            batch = self._stand_in
            self._batches.current = batch
        self._add(batch, counts=has_any)
        self._results.end_pass(self._ranks)
        self._ranks.in_step = True

    def _with_the_others(self) -> Iterator[Any]:
        """Yield the batches of this rank, then ``None`` as long as other ranks have batches."""
        yield from self._batches
        while self._ranks.world > 1:
            yield None
            if not self._others_go_on:
                return

    def _note_moment(self) -> None:
        """Note the state after all batches so far, for a checkpoint; do nothing without one."""
        if self._checkpoint is None:
            return
        stored = None if self._stream.step.stored is None else self._stream.step.stored.place
        self._moment = Moment(self._batches.place(), self._draws.now(), self._number, self._steps, stored)
        self._results.whole = True

    def _keep_what_is_lacking(self) -> None:
        """Write a checkpoint of the last moment between two batches, if possible and not yet done."""
        if self._checkpoint is None:
            return
        moved = self._batches.looks_ahead or self._batches.count != self._moment.place["batches"]
        if self._checkpoint.lacks(self._moment.steps) and not (moved and self._batches.source.has_state):
            self._keep()  # a loader's own position may be behind that moment

    def _keep(self) -> None:
        """Write a checkpoint of the last moment between two batches, of all ranks, if the run has one."""
        if self._checkpoint is None or self._files is None:
            return
        moment, checkpoint, stored = self._moment, self._checkpoint, self._stream.step.stored
        checkpoint.begin()
        if stored is not None:  # the rows that the checkpoint names are on the disk before it
            self._ranks.attempt(stored.writer.commit)
        tensors = self._ranks.attempt(lambda: packed(self._own_state()))
        written = self._files.write(checkpoint.folder.number + 1, tensors)
        counts = self._ranks.each((moment.place["batches"], self._results.samples))
        facts = {"reading": self._reading, "complete": self._is_complete, "number": moment.number}

        def write() -> None:
            if not self._ranks.rank:
                checkpoint.complete(self._said(counts), facts, moment.steps, written)

        self._ranks.attempt(write)

    def _said(self, counts: list[tuple[int, int]]) -> str:
        """Describe a checkpoint of the last moment, for messages, by the batches and samples of each rank."""
        samples = sum(each for _, each in counts)
        if self._is_complete:
            return f"the results of all {samples:,} samples"
        batches = self._said_batches([each for each, _ in counts], self._moment.number)
        if self._reading == 0:
            return f"the first {batches:,} batches, {samples:,} samples"
        return f"all batches once, and the first {batches:,} batches of a second reading"

    def _said_batches(self, counts: list[int], number: int) -> int:
        """Return the number of batches that all ranks have done; ``number`` is that of the next one."""
        source = self._batches.source
        return min(number, len(source)) if isinstance(source, Samples) else sum(counts)

    def _own_state(self) -> dict[str, Any]:
        """Return the state that this rank continues from."""
        place = {
            **self._moment.place,
            "loader": self._batches.loader_state(),
            "ended": self._batches.ended,
            "now": self._moment.draws,
            "begin": self._draws.begin,
            "stored": None,
        }
        if self._stream.step.stored is not None and self._moment.stored is not None:
            place["stored"] = (*self._moment.stored, self._stream.step.stored.writer.checksum)
        results = self._results.saved()
        if self._ranks.rank:  # all ranks have the same results of a first reading
            results["rotations"] = []
        chunks, shards = self._chunk_sizes.saved(), self._results.shards_kept()
        return {"place": place, "results": results, "chunks": chunks, "shards": shards}


def _with(error: PackpropError, kept: str) -> PackpropError:
    """Return the same error, which also says what is kept."""
    return type(error)(error.asked, error.where, error.why, f"{error.instead}; {kept}")
