"""Checkpoints of a run over a data set: when to write them, what they belong to, and refusals."""

from __future__ import annotations

import contextlib
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from packprop.applications.dataset.folder import Damaged, Folder, LockedElsewhere, OfRank, WriteError
from packprop.applications.dataset.identity import Identity, difference
from packprop.applications.dataset.rank_files import OfRanks
from packprop.applications.dataset.saved import ASKED, Facts, Pieces, SavedRun, packed, unpacked
from packprop.applications.dataset.shard_files import WrittenShards
from packprop.applications.dataset.values import decode, encode
from packprop.errors import BadInput, PackpropError, PackpropWarning
from packprop.store.schema import Unfit, fitted, fitted_as
from packprop.store.shard import require_plain_files

FORMAT = {"what": "a packprop checkpoint of a data set", "format": 5}
"""The first facts of each checkpoint."""

SHARE = 50
"""Seconds of work for each second of writing, at least, for checkpoints by the clock."""

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}

clock = time.monotonic


class Moment(NamedTuple):
    """The state of a run between two batches.

    Args:
        place: The place in the data.
        draws: Random states, of the global generators and of those of extensions.
        number: The number of the next batch, among those of all ranks.
        steps: Batches since this run began.
        stored: Samples and terms in the store, if there is one.
    """

    place: dict[str, Any]
    draws: dict[str, Any]
    number: int
    steps: int
    stored: tuple[int, float] | None


class Every:
    """A frequency of something along the way.

    Args:
        asked: Batches or steps, or a time as ``"30s"``, ``"5min"``, ``"1h"``.
        call: The call, for an error.

    Raises:
        BadInput: If it is neither.
    """

    def __init__(self, asked: int | str, call: str = ASKED) -> None:
        self.batches, self.seconds = 0, 0.0
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h)\s*", asked) if isinstance(asked, str) else None
        if found:
            self.seconds = float(found[1]) * UNITS[found[2]]
        elif isinstance(asked, int) and not isinstance(asked, bool) and asked > 0:
            self.batches = asked
        else:
            raise BadInput(
                call,
                f"every={asked!r}",
                "it is neither a time nor a number of batches or steps",
                'give a time such as "30s", "5min" or "1h", or a number such as 100',
            )


class Checkpoint:
    """The checkpoint of one run, inside a folder that no other run writes to.

    Args:
        folder: The folder; made if it is missing.
        every: How often to write it.
        identity: A description of the run.
    """

    def __init__(self, folder: str | Path, every: Every, identity: Identity) -> None:
        self._folder, self._every, self._identity = Folder(folder), every, identity
        self._batches, self._safe, self._took = 0, 0, 0.0
        self._last = self._begun = clock()
        self._held, self._failed = "", False

    @contextlib.contextmanager
    def open(self) -> Iterator[Checkpoint]:
        """Give the folder to this run inside.

        Raises:
            BadInput: If it is used by another run, holds other files, or cannot be written to.
        """
        instead = "give a folder that is empty, or that can be made"
        where = f"checkpoint={str(self._folder.path)!r}"
        require_plain_files(ASKED, self._folder.path)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._folder.locked())
                strangers = [] if self._folder.numbers() else self._folder.strangers()
            except LockedElsewhere:
                why = "another run writes its checkpoints there"
                raise BadInput(ASKED, where, why, "wait for its end, or give another folder") from None
            except OSError as error:
                raise BadInput(
                    ASKED, where, f"nothing can be written there: {error.strerror or error}", instead
                ) from error
            if strangers:
                why = f"it holds other files: {', '.join(strangers[:3])}"
                raise BadInput(ASKED, where, why, instead)
            yield self

    def load(self) -> tuple[dict[str, Any], list[Any]] | None:
        """Return state and pieces of the last readable checkpoint; ``None`` if none has been written.

        The sums of ranks are those of the first one; ``others`` are then the files of the others.

        Raises:
            BadInput: If it belongs to something else.
            PackpropError: If none can be read.
        """
        damages: list[str] = []
        for number in self._folder.numbers():
            try:
                facts, tensors, rows = self._folder.read(number)
                self._require_own(facts)
                state = fitted_as(SavedRun, decode(facts["state"], tensors))
                pieces = [piece for file in rows for piece in unpacked(Pieces, file)]
                if len(self._folder.others) != len(state["ranks"]) - 1:
                    raise Unfit(
                        f"{len(state['ranks'])} ranks have {len(self._folder.others)} files beside the first"
                    )
            except (Damaged, Unfit) as error:
                damages.append(str(error))
                continue
            if damages:
                warnings.warn(
                    f"A checkpoint in {str(self._folder.path)!r} cannot be read ({damages[0]}); the work "
                    f"goes on from the one before: {facts['said']}.",
                    PackpropWarning,
                    stacklevel=2,
                )
            self._held = facts["said"]
            self._last = clock()
            return {**state, "shards": str(self._folder.shards(number).resolve())}, pieces
        if damages:
            raise PackpropError(
                ASKED,
                f"the checkpoint in {str(self._folder.path)!r}",
                f"none of it can be read: {'; '.join(damages)}",
                "remove the folder to begin again, or put back a copy of its files",
            )
        return None

    def _require_own(self, facts: dict[str, Any]) -> None:
        where = f"the checkpoint in {str(self._folder.path)!r}"
        if {key: facts.get(key) for key in FORMAT} != FORMAT:
            raise BadInput(
                ASKED,
                where,
                f"it is {facts.get('what')!r} in format {facts.get('format')!r}, not in format "
                f"{FORMAT['format']}",
                "go on with the version of packprop that wrote it, or give another folder",
            )
        fitted(Facts, facts)
        found = difference(facts["identity"], self._identity)
        if found is not None:
            name, sides = found
            raise BadInput(
                ASKED,
                where,
                f"it belongs to something else, by its {name}: {sides}",
                "call with what it was begun with, or give another folder",
            )

    def due(self, batches: int) -> bool:
        """Tell whether so many batches of this run are enough for another checkpoint."""
        if self._every.batches:
            return batches - self._batches >= self._every.batches
        return clock() - self._last >= max(self._every.seconds, SHARE * self._took)

    def lacks(self, batches: int) -> bool:
        """Tell whether there are batches of this run that no checkpoint has."""
        return batches > self._safe

    def require_plain(self, state: Any, pieces: Sequence[Any]) -> None:
        """Refuse results that have no form in a file.

        Raises:
            BadInput: With their type.
        """
        packed([state, list(pieces)])

    def begin(self) -> None:
        """Count the work from now on, such as exchanges between ranks, as time for a checkpoint."""
        self._begun = clock()

    @property
    def path(self) -> Path:
        """The folder."""
        return self._folder.path

    @property
    def others(self) -> list[OfRank]:
        """The files of ranks other than the first, in the checkpoint that was read."""
        return self._folder.others

    @property
    def next_number(self) -> int:
        """The number of the next checkpoint."""
        return self._folder.number + 1

    def write_rows_anew(self) -> None:
        """Make the next checkpoint hold all rows, not only those since the one before."""
        self._folder.write_rows_anew()

    @property
    def next_shards(self) -> Path:
        """The folder for the ranks' shards of the next checkpoint."""
        return self._folder.shards(self.next_number).resolve()

    def write(
        self,
        state: Any,
        pieces: Sequence[Any],
        said: str,
        batches: int,
        shards: WrittenShards,
        others: OfRanks,
    ) -> bool:
        """Write a checkpoint that was begun; return whether that worked.

        If it fails, a warning says so the first time, and the work continues.

        Args:
            state: The state that the run continues from.
            pieces: The pieces of growing results, since the checkpoint before.
            said: Its contents, for messages.
            batches: The batches of this run so far.
            shards: The files that the ranks have written to ``next_shards`` before.
            others: The files that ranks other than this one have written before.
        """
        tensors: list[Tensor] = []
        self.require_plain(state, pieces)
        facts = {**FORMAT, "said": said, "identity": self._identity, "state": encode(state, tensors)}
        try:
            if shards.failure or others.failure:
                raise OSError(shards.failure or others.failure)
            rows = packed([*pieces]) if pieces else []
            self._folder.write(facts, tensors, rows, shards.files, others.files)
        except WriteError as error:
            self._folder.discard(others.files)
            if not self._failed:  # once, until one is written again
                warnings.warn(
                    f"The checkpoint in {str(self._folder.path)!r} could not be written: {error}. The work "
                    f"goes on, and tries again; {self.kept or 'nothing is kept yet.'}",
                    PackpropWarning,
                    stacklevel=2,
                )
            self._failed = True
            return False
        finally:
            self._last, self._batches = clock(), batches
            self._took = self._last - self._begun
        self._held, self._safe, self._failed = said, batches, False
        return True

    @property
    def kept(self) -> str:
        """Return the safe part, as a sentence; empty if there is none."""
        return f"what is kept in {str(self._folder.path)!r}: {self._held}." if self._held else ""


def require_checkpoint(asked: str, where: str, folder: str | Path) -> None:
    """Refuse a folder without a checkpoint for a run that has to continue.

    Raises:
        BadInput: If it holds none.
    """
    if not Path(folder).is_dir() or not Folder(folder).numbers():
        raise BadInput(
            asked,
            where,
            "there is no checkpoint in that folder",
            "name the folder of the run that shall go on, or begin one with --checkpoint",
        )
