"""Several processes that work on one data set in step, each on its own batches; packprop merges their results.

# NOTE [In step]
All ranks do as many steps as the one with the most batches. Each begins a step with one small message: whether
it has a batch, has failed, finds that a checkpoint is due; and ends it when all have sent theirs. So a rank may
be one batch ahead of a slower one, ranks with unequal numbers of batches end together, and an error on one is
an error on all. The others notice a dead rank at the end of their step, because its connections are closed.

A checkpoint, and the end of a reading, begin with exchanges of another kind, which a rank that fails in the
step before would not reach. So the step before such an exchange ends with one more message: ranks begin the
exchange only if none has failed.

If ``fully_shard`` has sharded the model, ranks also exchange a message before each unit of a forward pass, and
at its end. So the other ranks hear of one that fails in its forward pass, instead of waiting for its shards,
and ranks notice if they come to different units.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from packprop.applications.dataset.digests import seed_from
from packprop.engine.algebra import Monoid
from packprop.engine.distributed import AllRanks, arrive, exchanged, merged_in_turn, ranks_of
from packprop.engine.tensors import map_tensors
from packprop.errors import BadInput, PackpropError

ASKED = "compute(...) was called on several ranks."

Value = TypeVar("Value")
Key = TypeVar("Key")


class OtherRankFailed(PackpropError):
    """Raised if another rank has failed, or ended: this one cannot continue."""


class Ranks:
    """The processes that share the work; one alone is the usual case.

    Args:
        all_ranks: The ranks; ``None`` for this process alone.
    """

    def __init__(self, all_ranks: AllRanks | None = None) -> None:
        self.all = all_ranks
        self.rank, self.world = 0, 1
        if all_ranks is not None:
            self.rank = torch.distributed.get_rank(all_ranks.group)
            self.world = torch.distributed.get_world_size(all_ranks.group)
        self.in_step = False
        """True while the others wait for this rank's message."""
        self._begun: Callable[[], list[int]] | None = None

    def arrive(self) -> None:
        """Wait until all ranks have begun.

        Raises:
            PackpropError: If some do not come in time; gloo names them.
        """
        if self.world > 1 and self.all is not None:
            instead = "call compute(...) on all ranks; or, on some of them alone, with ranks='own'"
            arrive(self.all.group, self.all.timeout, ASKED, instead)

    def agree(self, has_any: bool) -> bool:
        """Tell whether any rank has samples.

        Raises:
            OtherRankFailed: If another rank has failed, or is gone.
        """
        self.begin_step(has_any, lambda: False)
        return self.end_step()[0]

    def begin_step(self, has_batch: bool, due: Callable[[], bool]) -> None:
        """Tell the other ranks whether this one has a batch; the first rank also tells if a checkpoint is due.

        It waits for no other rank: a rank that is slower in one batch can be faster in the next one. One
        process alone calls ``due`` at the end of the step, after it has added the batch.
        """
        if self.world == 1:
            self._begun = lambda: [has_batch, False, due(), 0, 0]
        else:
            self._begun = self._begin_round(has_batch=has_batch, due=not self.rank and due())

    def end_step(self) -> tuple[bool, bool]:
        """Return whether any rank had a batch, and whether the first rank said that a checkpoint is due.

        It waits until all ranks have begun the step; if no other step comes next, until all have ended it.

        Raises:
            OtherRankFailed: If another rank has failed, or is gone.
        """
        assert self._begun is not None
        had, failed, due_now, *_ = self._begun()
        self._begun = None
        if self.world > 1 and not failed and (due_now or not had):
            failed = self._begin_round()()[1]
        if failed:
            self._raise_what_others_tell()
        return bool(had), bool(due_now)

    def come_to(self, unit: int) -> None:
        """Wait until all ranks are about to make the unit with this number whole in a forward pass.

        Raises:
            OtherRankFailed: If another rank has failed, or is gone.
            PackpropError: On every rank, if others come to another unit, or have come to the end.
        """
        self._require_same_place(1 + unit)

    def come_through(self) -> None:
        """Wait until all ranks have come to the end of a forward pass; afterwards none waits for a message.

        Raises:
            OtherRankFailed, PackpropError: As ``come_to``.
        """
        self._require_same_place(0)
        self.in_step = False

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed, if they wait for its message."""
        if self.world == 1 or not self.in_step or isinstance(error, OtherRankFailed):
            return
        self.in_step = False
        with contextlib.suppress(Exception):  # the first error says more
            others_wait = self._begun is None or not self._begun()[1]  # unless one has also failed in this step
            if others_wait:
                self._begin_round(failed=True)()
            self.each(str(error) or type(error).__name__)

    def attempt(self, work: Callable[[], Value]) -> Value:
        """Return the result of ``work`` if it succeeds on all ranks; tell all of a failure or an interrupt.

        Raises:
            OtherRankFailed: If it fails on another rank, with the report of that rank.
        """
        try:
            value = work()
        except BaseException as error:
            self.each(str(error) or type(error).__name__)
            raise
        self._raise_what_others_tell()
        return value

    def each(self, value: Value) -> list[Value]:
        """Return the values of all ranks, in their order."""
        if self.world == 1 or self.all is None:
            return [value]
        with self._noticing():
            return exchanged(value, self.all.group)

    def given_to_all(self, value: Value | None) -> Value | None:
        """Return the value of this rank; on a rank without a value, that of the first rank with one.

        Raises:
            BadInput: On the rank that sends its value, if that fails; ``OtherRankFailed`` on the others.
        """
        lacking = self.each(value is None)
        if not any(lacking) or all(lacking):
            return value
        giver = lacking.index(False)
        sent = self.each(self.attempt(lambda: _packed(value) if self.rank == giver else b""))[giver]
        return self.attempt(lambda: pickle.loads(sent) if value is None else value)

    def merged_in_turn(
        self, partial: Mapping[Key, Any], monoid_of: Callable[[Key], Monoid]
    ) -> Iterator[tuple[Key, Any]]:
        """Yield merged partial results, a few at a time; growing ones as lists with a piece for each rank."""
        if self.world == 1 or self.all is None:
            yield from [*partial.items()]
            return
        with self._noticing():
            yield from merged_in_turn(partial, monoid_of, group=self.all.group)

    def derived(self, state: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """Return a state for the generator of this rank, whose draws differ from those of other ranks."""
        if self.rank == 0:
            return state
        seed = seed_from(state.numpy().tobytes() + str(self.rank).encode())
        return torch.Generator(device=device).manual_seed(seed).get_state()

    def _require_same_place(self, place: int) -> None:
        if self.world == 1:
            return
        _, failed, _, last, first = self._begin_round(place=place)()
        if failed:
            self._raise_what_others_tell()
        if last != -first:
            raise PackpropError(
                ASKED,
                f"rank {self.rank}, in the forward pass of a model that fully_shard has sharded",
                "ranks do not come to the same units of it in the same order, so that some would wait for ever",
                "let the model call the modules that fully_shard was called on in the same order on every "
                "rank; or call fully_shard on the module around those that only some batches go through",
            )

    def _begin_round(
        self, *, has_batch: bool = False, failed: bool = False, due: bool = False, place: int = 0
    ) -> Callable[[], list[int]]:
        """Send a message; return a function that waits for the others, and returns each part's maximum.

        The parts are the arguments, and the place with its sign changed.
        """
        assert self.all is not None
        on_gpu = torch.distributed.get_backend(self.all.group) == "nccl"
        told = [int(has_batch), int(failed), int(due), place, -place]
        message = torch.tensor(told, dtype=torch.int32, device="cuda" if on_gpu else "cpu")
        largest = torch.distributed.ReduceOp.MAX
        with self._noticing():
            work = torch.distributed.all_reduce(message, largest, self.all.group, async_op=True)

        def wait() -> list[int]:
            with self._noticing():
                work.wait()
            return message.tolist()

        return wait

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        """Explain a failed exchange."""
        try:
            yield
        except PackpropError:
            raise
        except RuntimeError as error:
            raise OtherRankFailed(
                ASKED,
                f"an exchange between rank {self.rank} and the others",
                f"it failed: one of them has ended ({str(error).splitlines()[0]})",
                "see what that rank printed last, and begin again",
            ) from error

    def _raise_what_others_tell(self) -> None:
        told: list[Any] = self.each(None)
        for rank, failure in enumerate(told):
            if failure is not None:
                why, instead = f"it has failed:\n{failure}\n", "read the error of that rank"
                raise OtherRankFailed(ASKED, f"rank {rank}", why, instead)


def _packed(value: Any) -> bytes:
    try:
        return pickle.dumps(map_tensors(Tensor.cpu, value))
    except Exception as error:
        raise BadInput(
            ASKED,
            "the first batch of a rank, which a rank without batches also has to go through",
            f"it cannot be sent there ({type(error).__name__}: {error})",
            "give batches that can be pickled, or give every rank a batch",
        ) from error


def ranks_for(ranks: Any) -> Ranks:
    """Return the ranks of a run: by default all, if there is a process group.

    Raises:
        BadInput: If the argument is unknown.
    """
    if ranks is None:
        there = torch.distributed.is_available() and torch.distributed.is_initialized()
        ranks = "all" if there else "own"
    elif not isinstance(ranks, AllRanks) and ranks not in ("own", "all"):
        raise BadInput(
            "compute(..., ranks=...) was called.",
            f"ranks={ranks!r}",
            "it does not say which samples values cover",
            "give 'own', 'all', or packprop.AllRanks(...)",
        )
    return Ranks(ranks_of(ranks))
