"""Comparison of an extension's values with a function of per-sample gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.engine.tensors import tensors_in
from packprop.testing.loops import Loops, gradients_in
from packprop.testing.passes import (
    columns_at_outputs,
    graph_of,
    same_draws,
    saved,
    subsampled,
    takes_subsampling,
)
from packprop.testing.problem import Problem
from packprop.testing.report import Ledger, Named
from packprop.types import INPUTS, Extension

LEAST_SLOPE = 1e-3
"""The least scale of a derivative's error, as a part of the largest value."""

Reference = Callable[..., Any]
"""A function from per-sample gradients ``[v, n, *p]`` of one parameter, a tensor per seed, to its value."""


def check_reference(ledger: Ledger, problem: Problem, extension: Extension, reference: Reference) -> None:
    """Compare values, values of some samples, and derivatives with those of the user's function."""
    gradients = _per_sample(ledger, problem, extension, create_graph=False)
    chosen = extension.subsampling

    def expected(tables: list[dict[str, Tensor]], chosen: Sequence[int] | None) -> Named:
        index = slice(None) if chosen is None else list(chosen)
        return {name: reference(*(table[name][:, index] for table in tables)) for name in tables[0]}

    ledger.same("reference", saved(problem, extension), expected(gradients, chosen))
    if takes_subsampling(extension) and problem.samples > 2:
        part = saved(problem, subsampled(extension, [2, 0]))
        ledger.same("reference", part, expected(gradients, [2, 0]), "subsampling [2, 0]")
    gradients = _per_sample(ledger, problem, extension, create_graph=True)
    values = expected(gradients, chosen)
    try:
        slopes = _slopes(problem, values)
    except NotImplementedError as missing:
        ledger.notes.append(f"not compared under create_graph=True: {missing}")
        return
    if slopes is None:
        return
    own = _slopes(problem, saved(problem, extension, create_graph=True))
    if own is None:
        why = "autograd finds no parameter that the values depend on"
        raise ledger.failed("differentiable", "all parameters", why)
    # values that are constant, such as shares of a single sample, have slopes that are rounding alone
    sizes = [tensor.detach().abs().amax().item() for tensor in tensors_in(values) if tensor.numel()]
    least = LEAST_SLOPE * max(filter(math.isfinite, sizes), default=0.0)
    ledger.same("differentiable", own, slopes, "gradient of a weighted sum of all values", least)


def _per_sample(
    ledger: Ledger, problem: Problem, extension: Extension, create_graph: bool
) -> list[dict[str, Tensor]]:
    """Return per-sample gradients ``[v, n, *p]`` for each seed, by loops with the same draws."""
    loops = Loops(problem, ledger, create_graph)
    loss, outputs = problem.forward()
    graph = graph_of(loss)
    gradients = []
    with same_draws(extension):
        for seed in dict.fromkeys(row.seed for row in extension.rows):
            if seed == INPUTS:
                continue
            if seed.kind == "gradient":
                cotangents = loops.by_sample(loops.slopes)[None]
            else:
                cotangents = columns_at_outputs(graph, seed, loops, outputs, create_graph)
                if seed.mc_samples is None:
                    squares = torch.einsum("vnc,vnd->ncd", cotangents, cotangents)
                    law = "columns are a root of the loss's Hessian"
                    ledger.same(law, {"(loss)": squares}, {"(loss)": loops.hessians})
            pulled = loops.pulled(cotangents)
            gradients.append({name: pulled[name] for name in loops.used})
    return gradients


def _slopes(problem: Problem, values: Named) -> Named | None:
    """Return the gradient of a fixed weighted sum of all values; ``None`` if the sum has no graph."""
    total: Tensor | float = 0.0
    generator = torch.Generator().manual_seed(1)
    for name in sorted(values):
        for tensor in tensors_in(values[name]):
            weights = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            total = total + (weights.to(tensor.device) * tensor).sum()
    if not isinstance(total, Tensor) or not total.requires_grad:
        return None
    gradients = gradients_in([*problem.parameters.values()], [total])
    return dict(zip(problem.parameters, gradients, strict=True))
