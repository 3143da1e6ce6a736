"""Groups of queries that are refined, and then looked for in the store; the work is kept in a folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from packprop.algebra.conjugate_gradients import ConjugateGradients
from packprop.dataset.digests import digest
from packprop.dataset.identity import identity_of
from packprop.extensions import BatchGrad
from packprop.queries.gradients import QueryGradients
from packprop.queries.keeping import DoneGroup, GroupInHand, Keeper, Work
from packprop.queries.refining import Refiner
from packprop.store.reading import Store
from packprop.store.search import Found
from packprop.tensors.calling import LossFunction


class RefinedSearch:
    """For one group of queries after the other, the stored samples at both ends.

    Args:
        asked: What the user asked for, for messages.
        store: The store.
        quantity: Which gradients of it.
        k: How many samples at each end.
        bite: Bytes of rows in hand.
        gradients: What has made the groups.
        refiner: What refines them.
        most: How many vectors fit at once while they are refined.
    """

    def __init__(
        self,
        asked: str,
        store: Store,
        quantity: str,
        k: int,
        bite: int,
        gradients: QueryGradients,
        refiner: Refiner,
        most: int,
    ) -> None:
        self._most = most
        self._asked, self._store, self._quantity, self._k, self._bite = asked, store, quantity, k, bite
        self._gradients, self._refiner = gradients, refiner
        self._keeper = Keeper(asked, None, None)
        self._place, self._before = 0, 0

    @property
    def readings(self) -> int:
        """How often the data were read, by this call and by those that it goes on from."""
        return self._before + self._refiner.readings

    @contextlib.contextmanager
    def kept(self, model: nn.Module, loss: LossFunction | None) -> Iterator[None]:
        """Inside, the work is kept in the folder of the refinement, if there is one."""
        folder = self._refiner.checkpoint
        if folder is None:
            yield
            return
        store: dict[str, Any] = {
            "quantity": self._quantity,
            "samples": self._store.samples,
            "identifiers": digest(self._store.identifiers),
            "k": self._k,
        }
        options = {**self._refiner.facts, "store": store}
        identity = identity_of(model, loss, [BatchGrad()], self._refiner.batches, **options)
        self._keeper = Keeper(self._asked, folder, identity)
        with self._keeper.open():
            self._before = self._keeper.work.readings
            yield

    def __call__(self, rows: dict[str, Tensor]) -> tuple[Found, ...]:
        """The largest and the smallest products of the next group; nothing is left of ``rows``."""
        place, stamp = self._place, " ".join(map(digest, rows.values()))
        self._place += 1
        known = self._keeper.known(place, stamp)
        if isinstance(known, DoneGroup):
            self._refiner.residuals.append(known.residuals)
            return Found(*known.largest), Found(*known.smallest)

        def keep(iterations: ConjugateGradients) -> None:
            done = self._keeper.work.done
            self._keeper.keep(Work(done, GroupInHand(stamp, iterations.state()), self.readings), now=False)

        state = None if known is None else known.state
        solved = self._refiner(rows, self._gradients.orders, state, self._most, keep)
        found = self._store.extremes(
            self._quantity, self._gradients.projected_rows(solved), self._k, memory=self._bite
        )
        group = DoneGroup(stamp, [*found[0]], [*found[1]], self._refiner.residuals[-1])
        self._keeper.keep(Work([*self._keeper.work.done, group], None, self.readings), now=True)
        return found
