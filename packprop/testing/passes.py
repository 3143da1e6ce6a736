"""Passes that the checks run."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.context import backpack
from packprop.curvature.seeds import columns
from packprop.engine.backward_pass import BackwardPass
from packprop.engine.chunks import ChunkSizes, default_chunk_sizes
from packprop.engine.request import Request
from packprop.graph.graph import Graph
from packprop.graph.samples import check_graph
from packprop.graph.walk import walk
from packprop.testing.loops import Loops, Problem, fixed_random_state
from packprop.testing.report import Named
from packprop.types import Extension, Seed


@contextlib.contextmanager
def same_draws(extension: Extension) -> Iterator[None]:
    """Whatever an extension draws inside, it draws the same every time."""
    generators = [row.seed.generator for row in extension.rows if row.seed.generator is not None]
    states = [generator.get_state() for generator in generators]
    with fixed_random_state():
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def graph_of(loss: Tensor) -> Graph:
    """What a backward pass from the loss goes through, with its samples located."""
    graph = walk([loss], [None], None)
    check_graph(graph)
    return graph


def observed(
    problem: Problem, extension: Extension, at_once: tuple[int, int | None], factor: float = 1.0
) -> dict[str, list[Any]]:
    """Merged results of each row, not finished, with some samples and columns taken at once."""
    found: dict[str, list[Any]] = {}
    names = {id(parameter): name for name, parameter in problem.parameters.items()}
    loss, _ = problem.forward()
    graph = graph_of(loss * factor)

    def done(leaf: Tensor, results: dict[Extension, list[Any]]) -> None:
        if extension in results:
            found[names.get(id(leaf), graph.name(leaf))] = results[extension]

    chunk_sizes = _Chunks(*default_chunk_sizes())
    chunk_sizes.at_once = at_once
    with same_draws(extension):
        BackwardPass(Request(graph, [extension], chunk_sizes), done).run(None)
    graph.release(keep=False)
    return found


def finished(extension: Extension, results: dict[str, list[Any]], samples: int) -> Named:
    """Values from copies of results: ``finish`` may change them, and is found out elsewhere."""
    fresh = copy.deepcopy(results)
    return {name: extension.finish(values, samples) for name, values in fresh.items()}


def saved(problem: Problem, extension: Extension, passes: int = 1, create_graph: bool = False) -> Named:
    """What is on the parameters after some backward passes through one graph."""
    attribute = extension.savefield
    parameters = problem.parameters
    for parameter in parameters.values():
        vars(parameter).pop(attribute, None)
    loss, _ = problem.forward()
    for remaining in reversed(range(passes)):
        with same_draws(extension), backpack(extension):
            loss.backward(retain_graph=remaining > 0 or create_graph, create_graph=create_graph)
    problem.model.zero_grad()
    return {n: vars(p)[attribute] for n, p in parameters.items() if attribute in vars(p)}


def columns_at_outputs(
    graph: Graph, seed: Seed, loops: Loops, outputs: Sequence[Tensor], create_graph: bool
) -> Tensor:
    """What the engine feeds in for a seed, pulled back to the model's outputs: ``[v, n, c]``."""
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
        full = [
            output.new_zeros(group.count, *output.shape) if part is None else part
            for output, part in zip(outputs, pulled, strict=True)
        ]
        parts.append(loops.by_sample(full, skip=1))
    return torch.cat(parts)


def two_passes(extension: Extension) -> bool:
    """Whether the columns are swept twice; results of parts of the samples are in bases of their own then."""
    return any(row.after is not None for row in extension.rows)


class _Chunks(ChunkSizes):
    """So many samples at once, and so many columns, or as many as fit."""

    at_once: tuple[int, int | None] = (1, 1)

    def samples_at_once(self, *_: Any) -> int:
        return self.at_once[0]

    def columns_at_once(self, count: int, *rest: Any) -> int:
        columns = self.at_once[1]
        return super().columns_at_once(count, *rest) if columns is None else min(columns, count)
