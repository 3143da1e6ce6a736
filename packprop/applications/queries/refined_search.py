"""Refining of queries, group by group, then the search for their samples; a folder keeps the work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn

from packprop.applications.dataset.digests import digest
from packprop.applications.dataset.identity import identity_of
from packprop.applications.queries.candidates import Candidates, Ends
from packprop.applications.queries.gradients import QueryGradients
from packprop.applications.queries.keeping import DoneGroup, GroupInHand, Keeper, Work
from packprop.applications.queries.refining import Refiner
from packprop.engine.algebra import ConjugateGradients
from packprop.engine.tensors import LossFunction
from packprop.extensions import BatchGrad
from packprop.store.search import Found


class RefinedSearch:
    """Finds, for one group of queries after the other, the samples at both ends.

    Args:
        asked: The call of the user, for messages.
        candidates: The samples.
        gradients: The maker of the groups.
        refiner: The refiner.
        most: The number of vectors that fit at once in refining.
    """

    def __init__(
        self,
        asked: str,
        candidates: Candidates,
        gradients: QueryGradients,
        refiner: Refiner,
        most: int,
    ) -> None:
        self._asked, self._candidates, self._most = asked, candidates, most
        self._gradients, self._refiner = gradients, refiner
        self._keeper = Keeper(asked, None, {})
        self._place, self._before = 0, 0

    @property
    def readings(self) -> int:
        """The number of readings of the data, by this call and by those that it continues."""
        return self._before + self._refiner.readings

    @contextlib.contextmanager
    def kept(self, model: nn.Module, loss: LossFunction | None) -> Iterator[None]:
        """Keep the work inside in the folder of the refinement, if there is one."""
        folder = self._refiner.checkpoint
        if folder is None:
            yield
            return
        options = {**self._refiner.facts, "store": self._candidates.facts()}
        identity = identity_of(model, loss, [BatchGrad()], self._refiner.batches, **options)
        self._keeper = Keeper(self._asked, folder, identity)
        with self._keeper.open():
            self._before = self._keeper.work.readings
            yield

    def __call__(self, rows: dict[str, Tensor]) -> Ends:
        """Return the results for the next group of queries; release ``rows``."""
        place, stamp = self._place, " ".join(map(digest, rows.values()))
        self._place += 1
        known = self._keeper.known(place, stamp)
        if isinstance(known, DoneGroup):
            self._refiner.residuals.append(known.residuals)
            return Ends(Found(*known.largest), Found(*known.smallest), known.groups, known.samples, known.terms)

        def keep(iterations: ConjugateGradients) -> None:
            done = self._keeper.work.done
            self._keeper.keep(Work(done, GroupInHand(stamp, iterations.state()), self.readings), now=False)

        state = None if known is None else known.state
        solved = self._refiner(rows, self._gradients.orders, state, self._most, keep)
        found = self._candidates.find(self._gradients.projected_rows(solved))
        largest, smallest, groups, samples, terms = found
        group = DoneGroup(stamp, [*largest], [*smallest], groups, self._refiner.residuals[-1], samples, terms)
        self._keeper.keep(Work([*self._keeper.work.done, group], None, self.readings), now=True)
        return found
