"""Whole parameters for packprop's sweeps through sharded models, on all ranks at once.

# NOTE [Rounds]
A parameter that ``fully_shard`` has sharded becomes whole only if all ranks take part. But each rank sweeps
through its graph as often as its own batch needs: one rank has other shapes and looks for its samples, another
takes its columns in more chunks. So before a sweep comes to a use whose parameters are not whole, the rank
tells all others which units of ``fully_shard`` it needs, and hears which they need. All ranks make every unit
whole that any of them has named. Each keeps the units that it named itself, until it needs another unit. A rank
that has finished its sweeps tells the others, and takes part in their rounds until all have finished. So no
rank waits for something that another rank does not do, however different their sweeps are. At most two units
are whole at a time, apart from those that have to be whole throughout.

The user's own backward pass belongs to ``fully_shard``, whose hooks run in it, and in no other.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch

from packprop.engine.distributed.merging import PATIENCE, RefusedElsewhere, arrive, exchanged
from packprop.engine.distributed.statement import AllRanks
from packprop.engine.graph.graph import Graph, ReachedUse
from packprop.engine.tensors.sharding import ShardedUnit
from packprop.errors import PackpropError
from packprop.types import Extension

ASKED = "A quantity beyond the gradient was asked for, of parameters that are sharded between processes."


Said = tuple[frozenset[int] | None, bool]
"""The message of a rank: the units that it needs, ``None`` after all its sweeps, and whether it has failed."""


class Residence:
    """Makes the sharded parameters of a graph whole for sweeps through their uses; see NOTE [Rounds].

    Sweeps run inside the context. Every rank leaves it before the user's own pass begins.

    Args:
        graph: The graph to sweep.
        at_once: Make all units whole for the whole time. Otherwise, only units with frozen parameters are:
            nothing tells where the graph needs these.
        timeout: Seconds to wait for the other ranks.
    """

    def __init__(self, graph: Graph, at_once: bool, timeout: float = PATIENCE) -> None:
        self._timeout = timeout
        self._told: RefusedElsewhere | None = None  # another rank has refused, and no rank waits any more
        self._keeps = False  # whether everything stays until the end
        self._units, self._graph = graph.units, graph
        self._always = [unit for unit in self._units if at_once or unit.is_partly_frozen]
        self._place = {id(whole): place for place, unit in enumerate(self._units) for whole, _ in unit.pairs}
        self._group = group_of(self._units)
        self._resident: frozenset[int] = frozenset()
        self._handles: list[Any] = []

    def __enter__(self) -> Residence:
        arrive(self._group, self._timeout)
        self._always = [unit for unit in self._always if not unit.is_whole]
        with torch.no_grad():
            for unit in self._always:
                unit.unshard()
        for use in self._graph.uses:
            use.prepare = functools.partial(self._need, self._units_of(use))
            self._handles += [node.register_prehook(use.prepare) for node in use.anchors]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        for use in self._graph.uses:
            use.prepare = None
        self._leave(frozenset())
        if self._told is not None:
            for unit in self._always:
                unit.reshard()
            if error is None:  # a sweep that may fail has caught it
                raise self._told
            return
        said = self._round(None, failed=error is not None)
        while any(places is not None for places, _ in said):
            said = self._round(None, failed=error is not None)
        for unit in self._always:
            unit.reshard()
        failed = [rank for rank, (_, failed) in enumerate(said) if failed]
        if failed and error is None:
            raise PackpropError(
                ASKED,
                f"rank {failed[0]}",
                "it has refused its part of the pass, or failed in it",
                "read the error of that rank",
            )

    def _units_of(self, use: ReachedUse) -> frozenset[int]:
        parameters = [site.leaf for site in use.sites]
        parameters += [entry.parameter for entry in use.entries or ()]
        return frozenset(self._place[id(each)] for each in parameters if id(each) in self._place)

    def _need(self, places: frozenset[int], *_: Any) -> None:
        """Make some units whole; as a hook, ignore what it is called with."""
        if self._told is not None:
            raise self._told
        if torch.is_grad_enabled():  # a later pass differentiates this pass again, in any order
            places, self._keeps = frozenset(range(len(self._units))), True
        missing = frozenset(place for place in places if not self._units[place].is_whole)
        if missing:
            self._leave(self._resident if self._keeps else places)
            self._round(missing)
            self._resident |= missing

    def _leave(self, needed: frozenset[int]) -> None:
        for place in self._resident - needed:
            self._units[place].reshard()
        self._resident &= needed

    def _round(self, own: frozenset[int] | None, failed: bool = False) -> list[Said]:
        """Exchange with all ranks which units each needs, and make them whole; ``None`` after all sweeps."""
        with torch.no_grad():
            said: list[Any] = exchanged((own, failed), self._group)
            strangers = [rank for rank, each in enumerate(said) if not isinstance(each, tuple)]
            if strangers:  # a rank that has refused its part before its sweeps sends a statement
                self._told = RefusedElsewhere(
                    ASKED,
                    f"rank {strangers[0]}",
                    f"it has refused its part of the pass:\n{getattr(said[strangers[0]], 'refused', '')}\n",
                    "read the error of that rank",
                )
                raise self._told
            for place in sorted(frozenset().union(*(places or () for places, _ in said))):
                unit = self._units[place]
                if not unit.is_whole:
                    unit.unshard()
                    if place not in (own or ()):
                        unit.reshard()
        return said


def group_of(units: Iterable[ShardedUnit]) -> torch.distributed.ProcessGroup | None:
    """Return the ranks that share the parameters of some units; ``None`` for all ranks.

    Raises:
        PackpropError: If the units do not share one group of ranks.
    """
    meshes = {shard.device_mesh for unit in units for _, shard in unit.pairs}  # type: ignore[attr-defined]  # DTensors
    if len(meshes) == 1:
        (mesh,) = meshes
        if mesh.size() == torch.distributed.get_world_size():
            return None
        if mesh.ndim == 1:
            group: torch.distributed.ProcessGroup = mesh.get_group()
            return group
    raise PackpropError(
        "A quantity beyond the gradient was asked for.",
        f"parameters that are sharded over {len(meshes)} meshes, of shapes "
        f"{', '.join(str(tuple(mesh.shape)) for mesh in meshes)}",
        "ranks make parameters whole together, and no single group of ranks shares all of these",
        "shard all parameters over one mesh, of one axis or of all ranks",
    )


def swept(
    graph: Graph, extensions: Sequence[Extension], ranks: AllRanks | None
) -> contextlib.AbstractContextManager[object]:
    """Return a context for sweeps through sharded parameters, up to the user's own pass; see NOTE [Rounds]."""
    if not graph.units:
        return contextlib.nullcontext()
    twice = any(extension.takes_hessian for extension in extensions)
    timeout = PATIENCE if ranks is None else ranks.timeout
    return Residence(graph, twice or not graph.holds_inputs, timeout)


def require_sharded(
    graph: Graph, extensions: Sequence[Extension], ranks: AllRanks | None, *, create_graph: bool, planned: bool
) -> None:
    """Refuse values that packprop cannot compute for sharded parameters, if the graph has any.

    Raises:
        PackpropError: If such values are asked for, the same on every rank.
    """
    if not graph.units:
        return
    if create_graph or planned:
        raise PackpropError(
            ASKED,
            "backward(create_graph=True)" if create_graph else "backpack(memory=...)",
            "the graph refers to parameters that are gone after the pass"
            if create_graph
            else "a plan does not count what is put together, nor what ranks exchange",
            "use DistributedDataParallel, or leave it out",
        )
    for extension in extensions:
        if any(row.seed.kind == "graph" for row in extension.rows):
            raise PackpropError(
                ASKED,
                f"extension {extension.name}",
                "it goes through the graph outside of all sweeps, where parameters are not put together",
                "use DistributedDataParallel, or another extension",
            )
        if graph.terms and extension.takes_hessian:
            raise PackpropError(
                ASKED,
                f"extension {extension.name}, where a penalty is added to the loss",
                "the penalty is a function of shards, the rest of the loss one of whole parameters",
                "call backward() of the penalty apart from that of the loss",
            )
        if ranks is None and any(row.sums and not row.whole for row in extension.rows):
            raise PackpropError(
                ASKED,
                f"extension {extension.name}",
                "its sums over samples belong to a whole parameter, and each rank holds only a part of it",
                "ask for values of the samples of all ranks: backpack(..., ranks='all')",
            )
    if ranks is not None:
        own = torch.distributed.get_process_group_ranks(group_of(graph.units) or torch.distributed.group.WORLD)
        asked = torch.distributed.get_process_group_ranks(ranks.group or torch.distributed.group.WORLD)
        if sorted(own) != sorted(asked):
            raise PackpropError(
                ASKED,
                "AllRanks(group=...)",
                f"parameters are sharded over ranks {sorted(own)}, but values cover ranks {sorted(asked)}",
                "give the group of ranks that share the parameters",
            )
