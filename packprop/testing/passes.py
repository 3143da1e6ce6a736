"""Passes of the engine for the checks, and their values."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.engine.context import backpack
from packprop.engine.curvature import columns, with_zeros
from packprop.engine.graph import Graph, walk
from packprop.engine.passes import BackwardPass, ChunkSizes, Request, default_chunk_sizes
from packprop.engine.samples import check_graph
from packprop.testing.loops import Loops
from packprop.testing.problem import Problem, fixed_random_state
from packprop.testing.report import Named
from packprop.types import Extension, Seed


@contextlib.contextmanager
def same_draws(extension: Extension) -> Iterator[None]:
    """Make an extension draw the same numbers each time that this context is entered."""
    generators = [row.seed.generator for row in extension.rows if row.seed.generator is not None]
    states = [generator.get_state() for generator in generators]
    with fixed_random_state():
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def graph_of(loss: Tensor) -> Graph:
    """Return the graph of a backward pass from the loss, with its samples located."""
    graph = walk([loss], [None], None)
    check_graph(graph)
    return graph


def observed(
    problem: Problem, extension: Extension, at_once: tuple[int, int | None], factor: float = 1.0
) -> dict[str, list[Any]]:
    """Return the merged results of each row, not finished, from chunks of ``at_once`` samples and columns."""
    merged: dict[str, list[Any]] = {}
    names = {id(parameter): name for name, parameter in problem.parameters.items()}
    loss, _ = problem.forward()
    graph = graph_of(loss * factor)

    def done(leaf: Tensor, results: dict[Extension, list[Any]]) -> None:
        if extension in results:
            merged[names.get(id(leaf), graph.name(leaf))] = results[extension]

    chunk_sizes = _FixedChunks(*default_chunk_sizes())
    chunk_sizes.at_once = at_once
    with same_draws(extension):
        BackwardPass(Request(graph, [extension], chunk_sizes), done).run(None)
    graph.release(keep=False)
    return merged


def finished(extension: Extension, results: dict[str, list[Any]], samples: int) -> Named:
    """Finish copies of the results: only the law "overwritten" should fail if ``finish`` changes them."""
    fresh = copy.deepcopy(results)
    return {name: extension.finish(values, samples) for name, values in fresh.items()}


def saved(problem: Problem, extension: Extension, passes: int = 1, create_graph: bool = False) -> Named:
    """Return the values on the parameters after some backward passes through one graph."""
    attribute = extension.savefield
    parameters = problem.parameters
    for parameter in parameters.values():
        vars(parameter).pop(attribute, None)
    loss, _ = problem.forward()
    own = [*parameters.values()] or None  # the loss may reach parameters of the user's, which are no copies
    for remaining in reversed(range(passes)):
        with same_draws(extension), backpack(extension):
            loss.backward(None, remaining > 0 or create_graph, create_graph, own)
    problem.model.zero_grad()
    return {n: vars(p)[attribute] for n, p in parameters.items() if attribute in vars(p)}


def columns_at_outputs(
    graph: Graph, seed: Seed, loops: Loops, outputs: Sequence[Tensor], create_graph: bool
) -> Tensor:
    """Return the engine's columns for a seed, pulled back to the model's outputs: ``[v, n, c]``."""
    parts = []
    for group in columns(graph, seed, create_graph):
        pulled = torch.autograd.grad(
            list(group.edges),
            list(outputs),
            group.chunk(0, group.count),
            is_grads_batched=True,
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
        )
        parts.append(loops.by_sample(with_zeros(pulled, outputs, group.count), skip=1))
    return torch.cat(parts)


def takes_subsampling(extension: Extension) -> bool:
    """Tell whether the extension takes ``subsampling`` as an argument, and this one has none."""
    known = "subsampling" in inspect.signature(type(extension)).parameters
    return known and extension.subsampling is None


def subsampled(extension: Extension, chosen: list[int]) -> Extension:
    """Return the same extension for some samples."""
    if dataclasses.is_dataclass(extension):
        other: Extension = dataclasses.replace(extension, subsampling=chosen)
    else:
        other = copy.copy(extension)
        other.subsampling = chosen
    return other


class _FixedChunks(ChunkSizes):
    """Chunk sizes with fixed numbers of samples and columns at once, or as many columns as fit."""

    at_once: tuple[int, int | None] = (1, 1)

    def samples_at_once(self, *_: Any) -> int:
        return self.at_once[0]

    def columns_at_once(self, count: int, *rest: Any) -> int:
        columns = self.at_once[1]
        return super().columns_at_once(count, *rest) if columns is None else min(columns, count)
