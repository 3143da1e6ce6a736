"""Uses inside reentrant checkpoints. packprop runs the function again to find them and their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from packprop.engine.functions.entry import Cotangents, Entry, Samples
from packprop.engine.graph.graph import Graph, ReachedUse, ReentrantCheckpoint
from packprop.engine.recording.marks import InputSource
from packprop.engine.recording.reentrant import Rerun, differs, refused, run_again
from packprop.engine.tensors.layout import Layout


def uses_inside(checkpoint: ReentrantCheckpoint, reached: set[int]) -> list[ReachedUse]:
    """Find the uses in a checkpoint, without their inputs.

    Args:
        checkpoint: The checkpoint; it gets the uses.
        reached: The numbers of its outputs that lead to the roots.

    Raises:
        PackpropError: If it contains a loss or an unrecorded use, or takes a parameter as an argument.
    """
    checkpoint.reached = reached
    rerun, graph = _walk(checkpoint)
    checkpoint.signature, checkpoint.is_opaque = graph.signature, graph.is_opaque
    if graph.losses:
        raise refused("a loss in it is hidden from this pass")
    if graph.missing:
        leaf, consumer = graph.missing[0]
        raise refused(f"{consumer.name()} in it consumes a parameter of shape {list(leaf.shape)} out of sight")
    arguments = {id(value) for value in rerun.inputs}
    if any(id(site.leaf) in arguments for use in graph.uses for site in use.sites):
        raise refused("a parameter is one of its arguments, where reentrant checkpointing cuts the graph")
    for use in graph.uses:
        recorded = use.recorded
        source = ReentrantInputs(checkpoint, len(checkpoint.uses))
        entries = without_inputs(recorded.entries, source)
        inside = replace(recorded, entries=entries, edges=[], source=source)
        checkpoint.uses.append(
            ReachedUse(inside, checkpoint=checkpoint, undecided=use.undecided, suspect=use.suspect)
        )
    graph.drop_checkpoint_uses()
    return checkpoint.uses


def walk_again(checkpoint: ReentrantCheckpoint) -> tuple[Rerun, Graph]:
    """Run a checkpoint's function again, and walk the new graph.

    Raises:
        PackpropError: If the function calls other functions than before.
    """
    rerun, graph = _walk(checkpoint)
    if _calls(checkpoint.uses) != _calls(graph.uses):
        raise differs("a layer", "it called other functions")
    for inside, outside in zip(graph.uses, checkpoint.uses, strict=True):
        inside.layouts = outside.layouts
    return rerun, graph


def _walk(checkpoint: ReentrantCheckpoint) -> tuple[Rerun, Graph]:
    rerun = run_again(checkpoint.node)
    roots = [
        value
        for number, value in enumerate(rerun.outputs)
        if value is not None and value.requires_grad and number in checkpoint.reached
    ]
    return rerun, checkpoint.walk(roots)


def _calls(uses: list[ReachedUse]) -> list[tuple[str, list[torch.Size]]]:
    return [(use.recorded.name, use.recorded.shapes) for use in uses]


def without_inputs(entries: Iterable[Entry], source: InputSource) -> list[Entry]:
    """Return the same entries without inputs; they fetch these whenever a structure is built."""

    def fetching(number: int, name: str) -> Callable[..., Any]:
        def structure_of(cotangents: Cotangents, layouts: Any, samples: Samples) -> Any:
            return getattr(source.fetch()[number], name)(cotangents, layouts, samples)

        return structure_of

    return [
        replace(
            entry,
            structure_of=fetching(number, "structure_of"),
            squares=None if entry.squares is None else fetching(number, "squares"),
            calls_node=_calls_none,  # the nodes of this run are gone
        )
        for number, entry in enumerate(entries)
    ]


def _calls_none(layouts: Sequence[Layout]) -> None:
    """Return ``None``: structures call no node of an existing graph."""


@dataclass(eq=False)
class ReentrantInputs:
    """The source of the inputs of a use in a reentrant checkpoint.

    Args:
        checkpoint: The checkpoint.
        number: The number of the use among those in the checkpoint.
        live: The entries with their inputs, while the checkpoint's own graph exists.
    """

    checkpoint: ReentrantCheckpoint
    number: int
    live: list[Entry] | None = None

    def ready(self) -> list[Entry] | None:
        """Return the entries while the checkpoint's own graph exists, else ``None``."""
        return self.live

    def fetch(self) -> list[Entry]:
        """Return the entries; run the checkpoint's function again if they are missing."""
        if self.live is None:
            _, graph = walk_again(self.checkpoint)
            for own, again in zip(self.checkpoint.uses, graph.uses, strict=True):
                assert isinstance(own.recorded.source, ReentrantInputs)
                own.recorded.source.live = again.entries()
            graph.drop_checkpoint_uses()
        assert self.live is not None
        return self.live

    def taken(self) -> None:
        """Drop the entries, which have another owner now."""
        self.live = None
