"""Whole parameters for packprop's sweeps through sharded models, on all ranks at once.

# NOTE [Rounds]
All ranks together make a parameter whole that ``fully_shard`` has sharded, or none does. But each rank sweeps
through its graph as often as its own batch needs: one has other shapes and looks for its samples, another takes
its columns in more chunks. So before a sweep comes to a use whose parameters are not there, the rank tells all
others which units it needs, and hears what they need. All ranks make every unit whole that any of them has
named. Each keeps the units that it named itself, until it needs another unit. A rank that has swept all says
so, and serves the others until all have. So no rank waits for something that another one does not do, however
different their sweeps are. And no more than two units are there at a time, apart from those that have to be
there throughout.

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
"""The words of a rank: the units that it needs, ``None`` if it needs nothing any more, and its failure."""


class Residence:
    """Makes the sharded parameters of a graph whole for sweeps through their uses; see NOTE [Rounds].

    Inside the context sweeps may run. Every rank leaves it before the user's own pass begins.

    Args:
        graph: The graph to sweep.
        at_once: Makes all parameters whole for the whole time. Otherwise this holds for those that are frozen,
            or that lie beside frozen ones: nothing tells where the graph needs these.
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
        """Make some units whole, whatever object this is the hook of."""
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
        """Say what this rank needs, hear what others need, and make it whole; ``None`` for nothing any more."""
        with torch.no_grad():
            said: list[Any] = exchanged((own, failed), self._group)
            strangers = [rank for rank, each in enumerate(said) if not isinstance(each, tuple)]
            if strangers:  # the words of a rank that was refused before its sweeps
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
        PackpropError: If that is not one group for all of them.
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
        "ranks must agree on what they put together: there is no one group of those that do",
        "shard all parameters over one mesh, of one axis or of all ranks",
    )


def swept(
    graph: Graph, extensions: Sequence[Extension], ranks: AllRanks | None
) -> contextlib.AbstractContextManager[object]:
    """Let sweeps go through sharded parameters inside; leave before the user's own pass. See NOTE [Rounds]."""
    if not graph.units:
        return contextlib.nullcontext()
    twice = any(extension.takes_hessian for extension in extensions)
    timeout = PATIENCE if ranks is None else ranks.timeout
    return Residence(graph, twice or not graph.holds_inputs, timeout)


def require_sharded(
    graph: Graph, extensions: Sequence[Extension], ranks: AllRanks | None, *, create_graph: bool, planned: bool
) -> None:
    """Refuse values that sharded parameters cannot have; refuse nothing if there are none.

    Raises:
        PackpropError: The same on every rank.
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
                "a sum over its samples belongs to a whole parameter, of which a rank holds a part only",
                "ask for values of the samples of all ranks: backpack(..., ranks='all')",
            )
    if ranks is not None:
        own = torch.distributed.get_process_group_ranks(group_of(graph.units) or torch.distributed.group.WORLD)
        asked = torch.distributed.get_process_group_ranks(ranks.group or torch.distributed.group.WORLD)
        if sorted(own) != sorted(asked):
            raise PackpropError(
                ASKED,
                "AllRanks(group=...)",
                f"parameters are sharded over ranks {sorted(own)}, values asked for of ranks {sorted(asked)}",
                "give the group of ranks that share the parameters",
            )
