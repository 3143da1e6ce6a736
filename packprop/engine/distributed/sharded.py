"""Values of parameters that ``fully_shard`` has sharded, and refusals by name."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from packprop.engine.distributed.arriving import PATIENCE
from packprop.engine.distributed.ranks import AllRanks
from packprop.engine.distributed.residence import ASKED, Residence, group_of
from packprop.engine.graph.graph import Graph
from packprop.errors import PackpropError
from packprop.types import Extension


def swept(
    graph: Graph, extensions: Sequence[Extension], ranks: AllRanks | None
) -> contextlib.AbstractContextManager[object]:
    """Let sweeps go through sharded parameters inside; leave before the user's own pass. See NOTE [Rounds]."""
    if not graph.units:
        return contextlib.nullcontext()
    twice = any(row.seed.kind.startswith("hessian") for extension in extensions for row in extension.rows)
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
        if graph.terms and any(row.seed.kind.startswith("hessian") for row in extension.rows):
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
