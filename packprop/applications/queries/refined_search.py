"""The refinement of queries and the search for their samples, group by group; a folder keeps the work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from packprop.applications.dataset.checkpoint import KeptWork
from packprop.applications.dataset.digests import digest
from packprop.applications.dataset.folder import Content
from packprop.applications.dataset.given import Objective
from packprop.applications.dataset.identity import identity_of
from packprop.applications.dataset.saved import packed, unpacked
from packprop.applications.queries.candidates import Candidates, Ends
from packprop.applications.queries.gradients import QueryGradients
from packprop.applications.queries.refining import Refiner
from packprop.engine.algebra import ConjugateGradients
from packprop.errors import BadInput
from packprop.extensions import BatchGrad
from packprop.store.schema import Size
from packprop.store.search import Found

FORMAT = {"what": "packprop's refined queries", "format": 3}
"""The first facts of each checkpoint."""


@dataclass(frozen=True)
class SavedGroup:
    """A finished group of queries: the digest of its gradients, its residuals, and its ``Ends``."""

    digest: str
    residuals: Tensor
    largest: tuple[Tensor, Tensor, Tensor]
    smallest: tuple[Tensor, Tensor, Tensor]
    groups: Tensor | None
    samples: Size
    terms: float


@dataclass(frozen=True)
class SavedSystem:
    """The current group of queries: the digest of its gradients, and the state of its linear systems."""

    digest: str
    state: dict[str, Tensor]


@dataclass(frozen=True)
class SavedWork:
    """The whole content of a checkpoint."""

    done: list[SavedGroup]
    current: SavedSystem | None
    readings: Size


class RefinedSearch:
    """Refines one group of queries after the other, and finds the samples at both ends.

    Args:
        objective: The model and the loss.
        candidates: The samples.
        gradients: The maker of the queries' gradients.
        refiner: The refiner.
        most: The number of vectors that fit at once into the memory for refining.
    """

    def __init__(
        self,
        objective: Objective,
        candidates: Candidates,
        gradients: QueryGradients,
        refiner: Refiner,
        most: int,
    ) -> None:
        self._objective, self._candidates, self._most = objective, candidates, most
        self._gradients, self._refiner = gradients, refiner
        self._kept: KeptWork | None = None
        self._done: list[dict[str, Any]] = []
        self._current: dict[str, Any] | None = None
        self._place, self._before = 0, 0

    @property
    def readings(self) -> int:
        """The number of readings of the data, by this call and by the calls that it continues."""
        return self._before + self._refiner.readings

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Continue from the folder of the refinement, if there is one, and keep there the work done inside."""
        asked, folder = self._objective.asked, self._refiner.checkpoint
        if folder is None:
            yield
            return
        options = {**self._refiner.facts, "store": self._candidates.facts()}
        model, loss = self._objective.model, self._objective.loss
        identity = identity_of(model, loss, [BatchGrad()], self._refiner.batches, **options)
        self._kept = kept = KeptWork(asked, folder, FORMAT, identity)

        def read(content: Content) -> dict[str, Any]:
            with kept.folder.opened(content.files[0]) as tensors:
                return unpacked(SavedWork, tensors)  # type: ignore[no-any-return]  # as it is declared

        with kept.open():
            work = kept.load(read)
            if work is not None:
                self._done, self._current, self._before = work["done"], work["current"], work["readings"]
            yield

    def __call__(self, rows: dict[str, Tensor]) -> Ends:
        """Return the results for the next group of queries; release ``rows``.

        Raises:
            BadInput: If the folder keeps the work of other queries in place of this group.
        """
        place, stamp = self._place, " ".join(map(digest, rows.values()))
        self._place += 1
        known = self._done[place] if place < len(self._done) else self._current
        if known is not None and known["digest"] != stamp:
            raise BadInput(
                self._objective.asked,
                f"checkpoint={str(self._refiner.checkpoint)!r}",
                "it belongs to other queries, or to another budget, which groups them differently",
                "repeat the call that began it, or give another folder",
            )
        if known is not None and known is not self._current:
            self._refiner.residuals.append(known["residuals"])
            largest, smallest = Found(*known["largest"]), Found(*known["smallest"])
            return Ends(largest, smallest, known["groups"], known["samples"], known["terms"])

        def keep(iterations: ConjugateGradients) -> None:
            self._current = {"digest": stamp, "state": iterations.state()}
            self._keep(now=False)

        state = None if known is None else known["state"]
        solved = self._refiner(rows, self._gradients.orders, state, self._most, keep)
        found = self._candidates.find(self._gradients.projected_rows(solved))
        group = {
            "digest": stamp,
            "residuals": self._refiner.residuals[-1],
            "largest": (*found.largest,),
            "smallest": (*found.smallest,),
            "groups": found.groups,
            "samples": found.samples,
            "terms": found.terms,
        }
        self._done, self._current = [*self._done, group], None
        self._keep(now=True)
        return found

    def _keep(self, now: bool) -> None:
        """Write the work: at once if ``now``, else if writing takes at most a fiftieth of the time."""
        kept = self._kept
        if kept is None or not (now or kept.is_due()):
            return
        kept.begin()

        def files() -> list[dict[str, Any]]:
            work = {"done": self._done, "current": self._current, "readings": self.readings}
            return [kept.folder.written(0, kept.folder.number + 1, packed(work))]

        kept.write(f"{len(self._done)} groups of queries, {self.readings} readings of the data", {}, files)
