"""Checkpoints of refined queries: the current system, and the results of groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from packprop.applications.dataset.checkpoint import KeptWork
from packprop.applications.dataset.folder import Content
from packprop.applications.dataset.identity import Identity
from packprop.applications.dataset.saved import packed, unpacked
from packprop.errors import BadInput
from packprop.store.schema import Size

FORMAT = {"what": "packprop's refined queries", "format": 3}
"""The first facts of each checkpoint."""


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

    def __init__(self, asked: str, folder: str | Path | None, identity: Identity) -> None:
        self._asked, self._where = asked, f"checkpoint={str(folder)!r}"
        self._kept = None if folder is None else KeptWork(asked, folder, FORMAT, identity)
        self.work = Work([], None, 0)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Give the folder to this call inside, as ``KeptWork`` does; ``work`` is then its content."""
        if self._kept is None:
            yield
            return

        def read(content: Content) -> Work:
            assert self._kept is not None
            with self._kept.folder.opened(content.files[0]) as tensors:
                work = unpacked(Work, tensors)
            hand = work["hand"]
            done = [DoneGroup(**group) for group in work["done"]]
            return Work(done, None if hand is None else GroupInHand(**hand), work["readings"])

        with self._kept.open():
            self.work = self._kept.load(read) or self.work
            yield

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
            raise BadInput(
                self._asked,
                self._where,
                "it belongs to other queries, or to another budget that groups them otherwise",
                "call with what it was begun with, or give another folder",
            )
        return found

    def keep(self, work: Work, now: bool) -> None:
        """Keep this from now on; write it at once, or if writing takes at most a fiftieth of the time."""
        self.work, kept = work, self._kept
        if kept is None or not (now or kept.is_due()):
            return
        kept.begin()

        def files() -> list[dict[str, Any]]:
            content = {
                "done": [vars(group) for group in work.done],
                "hand": None if work.hand is None else vars(work.hand),
                "readings": work.readings,
            }
            return [kept.folder.written(0, kept.folder.number + 1, packed(content))]

        kept.write(f"{len(work.done)} groups of queries, {work.readings} readings of the data", {}, files)
