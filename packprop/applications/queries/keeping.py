"""Checkpoints of refined queries: the current system, and the results of groups."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from packprop.applications.dataset.checkpoint import SHARE
from packprop.applications.dataset.folder import Damaged, Folder, LockedElsewhere
from packprop.applications.dataset.identity import Identity, difference
from packprop.applications.dataset.values import decode, encode
from packprop.errors import BadInput, PackpropError, PackpropWarning
from packprop.store.schema import Size, Unfit, fitted_as

FORMAT = {"what": "packprop's refined queries", "format": 2}
"""The first facts of each checkpoint."""

clock = time.monotonic


@dataclass(frozen=True)
class DoneGroup:
    """A finished group of queries: what stands for its gradients, its results, and its residuals.

    ``groups``: sums over groups of samples, if you asked for them; ``samples``: the number of all samples;
    ``terms``: the divisors of their losses, added up.
    """

    digest: str
    largest: list[Tensor]
    smallest: list[Tensor]
    groups: Tensor | None
    residuals: Tensor
    samples: Size
    terms: float


@dataclass(frozen=True)
class GroupInHand:
    """The current group: what stands for its gradients, and the state of its systems."""

    digest: str
    state: dict[str, Tensor]


@dataclass(frozen=True)
class Work:
    """The whole content of a checkpoint."""

    done: list[DoneGroup]
    hand: GroupInHand | None
    readings: Size


class Keeper:
    """Keeps the work of one call in a folder; does nothing without one.

    Args:
        asked: The call of the user, for messages.
        folder: The folder; ``None`` for none.
        identity: A description of the work.

    Attributes:
        work: The kept work, from before and from now on.
    """

    def __init__(self, asked: str, folder: str | Path | None, identity: Identity | None) -> None:
        self._asked, self._identity = asked, identity
        self._folder = None if folder is None else Folder(folder)
        self._last, self._took = clock(), 0.0
        self.work = Work([], None, 0)

    @contextlib.contextmanager
    def open(self) -> Iterator[Keeper]:
        """Give the folder to this call inside; ``work`` is then its content.

        Raises:
            BadInput: If it is in use, holds other files, is of something else, or cannot be written to.
            PackpropError: If it cannot be read.
        """
        if self._folder is None:
            yield self
            return
        where = f"checkpoint={str(self._folder.path)!r}"
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._folder.locked())
                strangers = [] if self._folder.numbers() else self._folder.strangers()
            except LockedElsewhere:
                instead = "wait for its end, or give another folder"
                raise BadInput(self._asked, where, "another call writes there", instead) from None
            except OSError as error:
                why = f"nothing can be written there: {error.strerror or error}"
                raise BadInput(self._asked, where, why, "give a folder that can be made") from error
            if strangers:
                why = f"it holds other files: {', '.join(strangers[:3])}"
                raise BadInput(self._asked, where, why, "give a folder that is empty, or that can be made")
            self._load(where)
            yield self

    def _load(self, where: str) -> None:
        assert self._folder is not None
        damages: list[str] = []
        for number in self._folder.numbers():
            try:
                facts, tensors, _ = self._folder.read(number)
                self._require_own(facts, where)
                work = fitted_as(Work, decode(facts["work"], tensors))
            except (Damaged, Unfit) as error:
                damages.append(str(error))
                continue
            hand = work["hand"]
            done = [DoneGroup(**group) for group in work["done"]]
            self.work = Work(done, None if hand is None else GroupInHand(**hand), work["readings"])
            return
        if damages:
            raise PackpropError(
                self._asked,
                where,
                f"none of it can be read: {'; '.join(damages)}",
                "remove the folder to begin again, or put back a copy of its files",
            )

    def _require_own(self, facts: dict[str, Any], where: str) -> None:
        if {key: facts.get(key) for key in FORMAT} != FORMAT:
            why = f"it is {facts.get('what')!r} in format {facts.get('format')!r}"
            raise BadInput(self._asked, where, why, "give a folder that is empty, or that can be made")
        assert self._identity is not None
        found = difference(facts["identity"], self._identity)
        if found is not None:
            name, sides = found
            why = f"it belongs to something else, by its {name}: {sides}"
            raise BadInput(self._asked, where, why, "call with what it was begun with, or give another folder")

    def known(self, place: int, digest: str) -> DoneGroup | GroupInHand | None:
        """Return the kept work of the group at a place, if there is any.

        Raises:
            BadInput: If it was another group.
        """
        found: DoneGroup | GroupInHand | None = None
        if place < len(self.work.done):
            found = self.work.done[place]
        elif place == len(self.work.done):
            found = self.work.hand
        if found is not None and found.digest != digest:
            assert self._folder is not None
            raise BadInput(
                self._asked,
                f"checkpoint={str(self._folder.path)!r}",
                "it belongs to other queries, or to another budget that groups them otherwise",
                "call with what it was begun with, or give another folder",
            )
        return found

    def keep(self, work: Work, now: bool) -> None:
        """Keep this from now on; write it at once, or if writing takes at most a fiftieth of the time."""
        self.work = work
        if self._folder is None or not (now or clock() - self._last >= SHARE * self._took):
            return
        begun, tensors = clock(), list[Tensor]()
        kept = {
            "done": [vars(group) for group in work.done],
            "hand": None if work.hand is None else vars(work.hand),
            "readings": work.readings,
        }
        facts = {**FORMAT, "identity": self._identity, "work": encode(kept, tensors)}
        try:
            self._folder.write(facts, tensors, [])
        except OSError as error:
            warnings.warn(
                f"The checkpoint in {str(self._folder.path)!r} could not be written: {error}. The work goes "
                "on, and tries again.",
                PackpropWarning,
                stacklevel=2,
            )
        self._last = clock()
        self._took = self._last - begun
