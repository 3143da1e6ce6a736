"""Diagonals of the Hessian, and values by double backward in the parameters, added to the results."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from torch import Tensor

from packprop.engine.algebra.monoid import ONE
from packprop.engine.algebra.structures import Dense, Diagonal
from packprop.engine.curvature.columns import Columns
from packprop.engine.curvature.double_backward import (
    estimated_diagonals,
    hessian_columns,
    parameter_diagonals,
    term_diagonals,
)
from packprop.engine.curvature.nonlinearities import OutputDiagonals, nonlinearity_terms
from packprop.engine.curvature.routes import Routes, choose_routes, swept_uses
from packprop.engine.curvature.second_order import cause_in
from packprop.engine.curvature.seeds import columns
from packprop.engine.graph.graph import Graph, ReachedUse
from packprop.engine.passes.accumulator import Accumulator
from packprop.engine.passes.column_sweeps import ColumnSweeps
from packprop.engine.passes.contributions import Contribution, diagonal, products_with
from packprop.engine.passes.finite import FiniteCheck
from packprop.engine.passes.request import Request, Task, by_subsampling
from packprop.engine.tensors.long_work import expect
from packprop.errors import PackpropError
from packprop.types import EXACT, Seed


def add_hessian(sweeps: ColumnSweeps, tasks: list[Task], roots: list[Columns] | None) -> list[Columns] | None:
    """Add the diagonals of the Hessian to the results; see NOTE [Hessian diagonal].

    Returns the columns of the GGN if all leaves still need their sweep, which is then left to the caller.
    """
    graph, create_graph = sweeps.request.graph, sweeps.request.create_graph
    per_sample = any(task.row.over_n.grows or task.extension.subsampling is not None for task in tasks)
    if roots is None:  # a loss without a root also has second derivatives
        with contextlib.suppress(PackpropError):
            roots = columns(graph, EXACT, create_graph)
    noted = sweeps.results.finite_check
    routes = choose_routes(graph, roots is not None, per_sample, create_graph)
    _add_terms(sweeps, tasks, routes, per_sample)
    if routes.is_gauss_newton:
        return roots
    swept = swept_uses(graph, routes)
    _add_nonlinearities(sweeps, tasks, routes, swept)
    for leaf, values in parameter_diagonals(graph, routes.parameter, per_sample, create_graph):
        noted.note([leaf], [values])
        for chosen, group in by_subsampling(tasks).items():
            structure = Diagonal(Dense((values if chosen is None else values[[*chosen]])[None]))
            for task in group:
                sweeps.results.add_value(leaf, task, task.row.statistic(structure))
    for uses, leaves in routes.output:
        for units, products in hessian_columns(graph, uses, create_graph):
            noted.note(leaves[:1], [column for columns in products for column in columns])
            for leaf in leaves:
                left, right = (_contributions(leaf, uses, each) for each in (products, units))
                sweeps.results.add_contributions(leaf, left, tasks, ONE, products_with(right))
    _find_cause(graph, noted)
    if routes.output or routes.parameter:
        if swept and roots is not None:
            expect("columns", sum(group.count for group in roots))
            sweeps.run(roots, tasks, swept)
        return None
    return roots


def _add_terms(sweeps: ColumnSweeps, tasks: list[Task], routes: Routes, per_sample: bool) -> None:
    """Add the terms that no sample enters to diagonals of the whole loss, not to diagonals of samples."""
    graph = sweeps.request.graph
    whole = [task for task in tasks if not task.row.over_n.grows and task.extension.subsampling is None]
    there = [] if per_sample else routes.parameter  # their diagonals contain these terms already
    leaves = [leaf for leaf in graph.leaves() if not any(leaf is other for other in there)]
    for leaf, values in term_diagonals(graph, leaves if whole else [], sweeps.request.create_graph):
        sweeps.results.finite_check.note([leaf], [values])
        for task in whole:
            value = task.row.statistic(Diagonal(Dense(values[None, None])))
            sweeps.results.add_value(leaf, task, value)


def _add_nonlinearities(
    sweeps: ColumnSweeps, tasks: list[Task], routes: Routes, swept: Sequence[ReachedUse]
) -> None:
    """Add the second derivatives of elementwise nonlinearities at the uses of swept leaves."""
    graph, create_graph = sweeps.request.graph, sweeps.request.create_graph
    diagonals = OutputDiagonals(graph, swept)
    noted = sweeps.results.finite_check
    for group, uses in nonlinearity_terms(graph, routes, swept, diagonals, create_graph):
        noted.note([uses[0].sites[0].leaf], [group.weights])
        sweeps.run([group], tasks, uses, diagonals=diagonals)
    for use, cotangents in diagonals.take():
        noted.note([use.sites[0].leaf], cotangents)
        for site in use.take():
            sweeps.results.add_contributions(site.leaf, [(use, site, cotangents)], tasks, ONE, diagonal)


def _find_cause(graph: Graph, noted: FiniteCheck) -> None:
    """Find the function whose second derivative is not finite, if any, while the graph still exists."""
    leaf = noted.first(graph)
    if leaf is None:
        return
    noted.cause = cause_in(graph, f"The diagonal of the Hessian in parameter {graph.name(leaf)!r}")


def _contributions(
    leaf: Tensor, uses: Sequence[ReachedUse], cotangents: Sequence[list[Tensor | None]]
) -> list[Contribution]:
    """Return the contributions of some uses to one leaf."""
    pairs = zip(uses, cotangents, strict=True)
    return [(use, site, each) for use, each in pairs for site in use.take() if site.leaf is leaf]


def add_without_sweep(request: Request, results: Accumulator, seed: Seed, tasks: list[Task]) -> None:
    """Add values that come from double backward in the parameters themselves."""
    graph = request.graph
    if seed.kind == "hessian_mc":
        for leaf, values in estimated_diagonals(graph, graph.leaves(), seed, request.create_graph):
            results.finite_check.note([leaf], [values])
            for task in tasks:
                results.add_value(leaf, task, task.row.statistic(Diagonal(Dense(values[None, None]))))
        _find_cause(graph, results.finite_check)
        return
    for task in tasks:
        for leaf, product in task.row.statistic(graph):
            results.add_value(leaf, task, product)
