"""A run over a data set: its readings, what is kept of it, and how it goes on from there."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from packprop.dataset.batches import Batches
from packprop.dataset.checkpoint import Checkpoint
from packprop.dataset.chunks import ChunkSizesByBatch
from packprop.dataset.parts import generators_of, readings_of
from packprop.dataset.sources import set_states, states_of
from packprop.dataset.state import Key
from packprop.dataset.stream import BatchStream
from packprop.errors import BadInput, PackpropError
from packprop.tensors.nesting import map_tensors
from packprop.tensors.random import random_states, set_random_states


class Moment(NamedTuple):
    """Where a run is between two batches.

    Args:
        place: Of the data.
        draws: Random states, of the global generators and of those of extensions.
        batches: Batches since this run began.
    """

    place: dict[str, Any]
    draws: dict[str, Any]
    batches: int


class Run:
    """One run over a data set.

    Args:
        batches: The data.
        stream: What batches are added to.
        chunk_sizes: How much of a batch is taken at once.
        device: Where results are.
        checkpoint: Where the run is kept, if it is.
        progress: Whether to show a bar.
    """

    def __init__(
        self,
        batches: Batches,
        stream: BatchStream,
        chunk_sizes: ChunkSizesByBatch,
        device: torch.device | str,
        checkpoint: Checkpoint | None,
        progress: bool,
    ) -> None:
        self._batches, self._stream, self._chunk_sizes = batches, stream, chunk_sizes
        self._device, self._checkpoint, self._progress = device, checkpoint, progress
        self._results = stream.step.merged
        self._readings = readings_of(stream.step.extensions)
        self._generators = generators_of(stream.step.extensions)
        self._reading, self._is_complete, self._done = 0, False, 0
        self._begin = self._draws()
        self._moment: Moment | None = None
        self._written: dict[Key, int] = {}
        batches.watched = checkpoint is not None

    def go_on(self) -> None:
        """Take up what the last checkpoint holds, if there is one.

        Raises:
            BadInput: If it belongs to something else.
        """
        found = None if self._checkpoint is None else self._checkpoint.load()
        if found is None:
            return
        state, pieces = found
        saved, grown = map_tensors(lambda tensor: tensor.to(self._device), (state["results"], pieces))
        self._results.restore(saved, [((key[0], key[1], key[2]), piece) for key, piece in grown])
        self._written = self._lengths()
        self._chunk_sizes.restore(state["chunks"])
        self._reading, self._is_complete = state["reading"], state["complete"]
        self._begin = state["begin"]
        if self._is_complete:
            self._batches.count = state["place"]["batches"]
        else:
            self._batches.go_to(state["place"])
        self._set_draws(state["draws"])

    def to_the_end(self) -> None:
        """Read the data as often as it takes; what was done when that fails is kept.

        Raises:
            PackpropError: Of any kind; it says what is kept.
        """
        try:
            with self._batches.explained():
                self._work()
        except BaseException as error:
            if self._checkpoint is None:
                raise
            if (
                self._results.whole
                and self._moment is not None
                and self._checkpoint.lacks(self._moment.batches)
            ):
                with contextlib.suppress(Exception):  # the error that is on its way says more
                    self._keep()
            if isinstance(error, PackpropError) and self._checkpoint.kept:
                raise _with(error, self._checkpoint.kept) from error.__cause__
            raise

    def _work(self) -> None:
        if self._is_complete:
            return
        first = self._batches.first()
        if first is not None:
            self._chunk_sizes.of(first)  # a budget that nothing fits is refused before any work
        self._read()
        if not self._results.samples:
            asked, instead = self._batches.asked, "give at least one sample"
            raise BadInput(asked, "data", "no samples were in any batch", instead)
        if len(self._readings) > 1:
            if self._reading == 0:
                self._turn_over()
                self._read()
            self._results.end_second_reading()
        self._is_complete = True
        if self._checkpoint is not None:
            self._note_moment()
            self._keep()

    def _turn_over(self) -> None:
        """End the first reading, and begin the second one."""
        self._results.end_first_reading()
        self._reading = 1
        self._set_draws(self._begin)
        self._batches.begin_again()
        if self._checkpoint is not None:
            self._note_moment()
            self._keep()

    def _read(self) -> None:
        """Read to the end of the current reading."""
        console = Console(stderr=True)
        hidden = not (self._progress and console.is_terminal)
        parts, second = self._readings[self._reading], self._reading == 1
        said = "packprop, second reading" if second else "packprop"
        for batch in track(self._batches, said, console=console, transient=True, disable=hidden):
            self._stream.add(batch, self._chunk_sizes.of(batch), parts, second)
            self._done += 1
            if self._checkpoint is not None:
                self._note_moment()
                if self._done == 1:  # what has no form in a file is refused now, not after half a minute
                    self._checkpoint.require_plain(self._state(), self._pieces())
                if self._checkpoint.due(self._done):
                    self._keep()

    def _note_moment(self) -> None:
        """Batches before this moment are merged, and no others."""
        self._moment = Moment(self._batches.place(), self._draws(), self._done)
        self._results.whole = True

    def _keep(self) -> None:
        """Write a checkpoint of the last moment between two batches, if that can be done and was not."""
        assert self._checkpoint is not None
        assert self._moment is not None
        taken = self._batches.count != self._moment.place["batches"]
        if taken and self._batches.has_state:  # the position of the loader is behind that moment
            return
        pieces, lengths = self._pieces(), self._lengths()
        if self._checkpoint.write(self._state(), pieces, self._said(), self._moment.batches):
            self._written = lengths

    def _said(self) -> str:
        """What a checkpoint of the last moment holds, for messages."""
        assert self._moment is not None
        if self._is_complete:
            return f"the results of all {self._results.samples:,} samples"
        batches = self._moment.place["batches"]
        if self._reading == 0:
            return f"the first {batches:,} batches, {self._results.samples:,} samples"
        return f"all batches once, and the first {batches:,} batches of a second reading"

    def _state(self) -> dict[str, Any]:
        """What a run goes on from, but for what grows with the data."""
        assert self._moment is not None
        return {
            "reading": self._reading,
            "complete": self._is_complete,
            "results": self._results.saved(),
            "chunks": self._chunk_sizes.saved(),
            "place": {
                **self._moment.place,
                "loader": self._batches.loader_state(),
                "ended": self._batches.ended,
            },
            "draws": self._moment.draws,
            "begin": self._begin,
        }

    def _pieces(self) -> list[tuple[Key, Tensor]]:
        """What has come to results that grow since the last checkpoint."""
        return [
            (key, piece)
            for key, pieces in self._results.partial.items()
            if self._results.grows(key)
            for piece in pieces[self._written.get(key, 0) :]
        ]

    def _lengths(self) -> dict[Key, int]:
        """How many pieces there are of each result that grows."""
        return {key: len(value) for key, value in self._results.partial.items() if self._results.grows(key)}

    def _draws(self) -> dict[str, Any]:
        """The random states that the next draws are made from."""
        states = {str(device): state for device, state in random_states().items()}
        return {"devices": states, "generators": states_of(self._generators)}

    def _set_draws(self, draws: dict[str, Any]) -> None:
        set_random_states({torch.device(name): state for name, state in draws["devices"].items()})
        set_states(self._generators, draws["generators"])


def _with(error: PackpropError, kept: str) -> PackpropError:
    """The same error, which also says what is kept."""
    return type(error)(error.asked, error.where, error.why, f"{error.instead}; {kept}")
