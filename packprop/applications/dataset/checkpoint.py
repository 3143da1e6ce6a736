"""Checkpoints of long work: the times to write them, the work that they belong to, and refusals."""

from __future__ import annotations

import contextlib
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from packprop.applications.dataset.folder import Content, Damaged, File, Folder, WriteError
from packprop.applications.dataset.identity import Identity, difference
from packprop.applications.dataset.rank_files import Written
from packprop.applications.dataset.saved import ASKED, Facts, RunFacts, SavedRank, unpacked
from packprop.errors import BadInput, PackpropError, PackpropWarning
from packprop.store.files import LockedElsewhere
from packprop.store.schema import Unfit, fitted
from packprop.store.shard import require_plain_files

FORMAT = {"what": "a packprop checkpoint of a data set", "format": 7}
"""The first facts of each checkpoint."""

SHARE = 50
"""The least seconds of work for each second of writing, if checkpoints follow the clock."""

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}

Value = TypeVar("Value")

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
    draws: dict[str, Tensor]
    number: int
    steps: int
    stored: tuple[int, float] | None


class Every:
    """The time, or the number of batches or steps, from one event of a run to the next.

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


class KeptWork:
    """The work of one call, kept in a folder that nothing else writes to.

    Args:
        asked: The call of the user, for messages.
        folder: The folder; made if it is missing.
        form: The kind of work and its format; the first facts of each checkpoint.
        identity: A description of the work.
    """

    def __init__(self, asked: str, folder: str | Path, form: Mapping[str, Any], identity: Identity) -> None:
        self.folder = Folder(folder)
        self._asked, self._form, self._identity = asked, dict(form), identity
        self._last = self._begun = clock()
        self._took, self._held, self._failed = 0.0, "", False

    @property
    def _where(self) -> str:
        return f"checkpoint={str(self.folder.path)!r}"

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Lock the folder for this call until the block ends.

        Raises:
            BadInput: If it is used by another call, holds other files, or cannot be written to.
        """
        why, instead = "", "give a folder that is empty, or that can be made"
        require_plain_files(self._asked, self.folder.path)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self.folder.locked())
                if not self.folder.numbers() and (strangers := self.folder.strangers()):
                    why = f"it holds other files: {', '.join(strangers[:3])}"
            except LockedElsewhere:
                why, instead = "another run writes there", "wait for its end, or give another folder"
            except OSError as error:
                why = f"packprop cannot write there: {error.strerror or error}"
            if why:
                raise BadInput(self._asked, self._where, why, instead)
            yield

    def load(self, read: Callable[[Content], Value]) -> Value | None:
        """Return the result of ``read`` for the last checkpoint that is whole; ``None`` if there is none.

        Raises:
            BadInput: If the checkpoint belongs to other work.
            PackpropError: If there are checkpoints, and none can be read.
        """
        damages: list[str] = []
        for number in self.folder.numbers():
            try:
                content = self.folder.read(number)
                self._require_own(content.facts)
                self.folder.require_whole(content.files)
                found = read(content)
            except (Damaged, Unfit) as error:
                damages.append(str(error))
                continue
            said = content.facts["said"]
            if damages:
                warnings.warn(
                    f"A checkpoint in {str(self.folder.path)!r} cannot be read ({damages[0]}); the run "
                    f"continues from the one before: {said}.",
                    PackpropWarning,
                    stacklevel=3,
                )
            self._held, self._last = said, clock()
            return found
        if damages:
            raise PackpropError(
                self._asked,
                self._where,
                f"none of it can be read: {'; '.join(damages)}",
                "remove the folder to begin again, or put back a copy of its files",
            )
        return None

    def _require_own(self, facts: Mapping[str, Any]) -> None:
        if {key: facts.get(key) for key in self._form} != self._form:
            raise BadInput(
                self._asked,
                self._where,
                f"it is {facts.get('what')!r} in format {facts.get('format')!r}, not in format "
                f"{self._form['format']}",
                "continue with the version of packprop that wrote it, or give another folder",
            )
        found = difference(fitted(Facts, facts).identity, self._identity)
        if found is not None:
            raise BadInput(
                self._asked,
                self._where,
                f"it belongs to something else, by its {found[0]}: {found[1]}",
                "give the arguments that it was begun with, or another folder",
            )

    def begin(self) -> None:
        """Begin a checkpoint: its time includes what follows, such as exchanges between ranks."""
        self._begun = clock()

    def is_due(self, seconds: float = 0.0) -> bool:
        """Tell whether ``seconds`` have passed since the last one, and writing takes a small share of time."""
        return clock() - self._last >= max(seconds, SHARE * self._took)

    def write(self, said: str, facts: Mapping[str, Any], files: Callable[[], Sequence[dict[str, Any]]]) -> bool:
        """Write a checkpoint that was begun; return True if that succeeds.

        If it fails, packprop warns the first time, and the work continues.

        Args:
            said: A description of its contents, for messages.
            facts: Further facts.
            files: Writes its files of tensors, and returns their descriptions.
        """
        try:
            self.folder.write({**self._form, "said": said, "identity": self._identity, **facts}, files())
        except WriteError as error:
            if not self._failed:  # warn once, until writing succeeds again
                warnings.warn(
                    f"The checkpoint in {str(self.folder.path)!r} could not be written: {error}. The run "
                    f"continues, and tries again; {self.kept or 'nothing is kept yet.'}",
                    PackpropWarning,
                    stacklevel=3,
                )
            self._failed = True
            return False
        finally:
            self._last = clock()
            self._took = self._last - self._begun
        self._held, self._failed = said, False
        return True

    @property
    def kept(self) -> str:
        """A sentence about the work that is safe; empty if none is."""
        return f"what is kept in {str(self.folder.path)!r}: {self._held}." if self._held else ""


class Told(NamedTuple):
    """The part of a checkpoint that all ranks get when they continue from it.

    Args:
        facts: The facts that all ranks share.
        files: The file of each rank that wrote.
        place: The place of the first rank.
        chunks: The chunk sizes of the first rank.
        shared: The results of the first rank that are not sums over its own batches.
        has_shards: True if the files hold shards of results.
    """

    facts: dict[str, Any]
    files: list[File]
    place: dict[str, Any]
    chunks: list[Any]
    shared: dict[str, Any]
    has_shards: bool


SHARED = ("rotations", "reduction", "weights", "terms")
"""The results that are the same on all ranks, or that every rank begins with."""


class Checkpoint(KeptWork):
    """The checkpoint of one run over a data set.

    Args:
        folder: The folder; made if it is missing.
        every: How often to write it.
        identity: A description of the run.
    """

    def __init__(self, folder: str | Path, every: Every, identity: Identity) -> None:
        super().__init__(ASKED, folder, FORMAT, identity)
        self._every = every
        self._batches, self._safe = 0, 0

    def loaded(self) -> tuple[Told, dict[str, Any]] | None:
        """Return the part of the last checkpoint for all ranks, and the state of the first rank."""

        def read(content: Content) -> tuple[Told, dict[str, Any]]:
            fitted(RunFacts, content.facts)
            with self.folder.opened(content.files[0]) as tensors:
                own = unpacked(SavedRank, tensors)
            facts = {name: content.facts[name] for name in ("reading", "complete", "number")}
            shared = {name: own["results"][name] for name in SHARED}
            told = Told(facts, content.files, own["place"], own["chunks"], shared, bool(own["shards"]))
            return told, own

        return self.load(read)

    def due(self, batches: int) -> bool:
        """Tell whether another checkpoint is due after this number of batches of this run."""
        if self._every.batches:
            return batches - self._batches >= self._every.batches
        return self.is_due(self._every.seconds)

    def lacks(self, batches: int) -> bool:
        """Tell whether no checkpoint has all of this run's first ``batches`` batches."""
        return batches > self._safe

    def complete(self, said: str, facts: Mapping[str, Any], batches: int, written: Written) -> None:
        """Write a checkpoint that was begun, as ``write`` does.

        Args:
            said: A description of its contents, for messages.
            facts: The facts that all ranks share.
            batches: The batches of this run so far.
            written: The files that the ranks have written before.
        """

        def files() -> Sequence[dict[str, Any]]:
            if written.failure:
                self.folder.discard(file["name"] for file in written.files)
                raise OSError(written.failure)
            return written.files

        self._batches = batches
        if self.write(said, facts, files):
            self._safe = batches


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
            "name the folder of the run to continue, or begin a run with --checkpoint",
        )
