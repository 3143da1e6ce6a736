"""Coverage of a model: the functions that use each parameter, and the extensions that apply."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packprop import extensions as catalogue
from packprop.applications.reports.coverage_values import Consumption, Coverage, Family, ParameterCoverage
from packprop.engine.algebra import Dense, join
from packprop.engine.curvature import Routes, choose_routes, columns, require_second_derivatives
from packprop.engine.functions import Entry, without_rules
from packprop.engine.graph import Graph, walk
from packprop.engine.recording import record, unchanged
from packprop.engine.samples import check_graph
from packprop.engine.tensors import (
    call,
    class_before_sharding,
    is_object,
    named_modules,
    named_parameters,
    require_graphs,
    tensors_in,
)
from packprop.errors import BadInput, PackpropError
from packprop.types import ENTRYWISE, EXACT, GRADIENT, GRAPH, INPUTS, Extension, Seed

ASKED = "coverage(model, batch) was called."

FAMILIES: dict[str, Callable[[set[Seed]], bool]] = {
    "gradients of samples": lambda seeds: seeds == {GRADIENT},
    "Hessian diagonals": lambda seeds: all(seed.kind in ("hessian", "hessian_mc") for seed in seeds),
    "Jacobians": lambda seeds: all(seed.kind == "jacobian" for seed in seeds),
    "GGN, exact": lambda seeds: seeds in ({EXACT}, {ENTRYWISE}),
    "GGN, sampled": lambda seeds: all(seed.mc_samples is not None for seed in seeds),
    "Kronecker factors": lambda seeds: INPUTS in seeds,
    "products": lambda seeds: seeds == {GRAPH},
    "others": lambda seeds: True,
}
"""For each family, a test of an extension's seeds; an extension belongs to the first family that fits."""

ANY_LOSS = ("gradients of samples", "Hessian diagonals", "Jacobians")
"""Families that need nothing from the loss."""

Fact = TypeVar("Fact")


def coverage(model: nn.Module, batch: Any) -> Coverage:
    """List the function that uses each parameter, its structure, and the extensions that apply.

    It makes one forward pass in the model's own mode. Unless the model returns a loss, it takes a squared
    error on its outputs. It restores buffers, attributes and the random state, and extends the model for
    this pass only. Your own forward hooks run.

    Args:
        model: Any module; you need not extend it.
        batch: ``(inputs, targets)`` as a data loader yields it, or inputs alone: a tensor, a dictionary
            of arguments, or an object. Pass several positional inputs as ``((a, b), targets)``. Targets are
            ignored.

    Returns:
        The facts about the model, which you can print.

    Raises:
        BadInput: If ``model`` is no module or not initialised, ``batch`` has another form, or inside
            ``torch.inference_mode()``.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> found = coverage(model, torch.zeros(5, 4))
        >>> [use.function for use in found.parameters["0.weight"].uses], found.samples
        (['linear'], 5)
    """
    require_graphs(ASKED)
    inputs = _inputs_of(batch)
    with unchanged(model, ASKED), torch.enable_grad():
        with record():
            outputs = call(model, inputs)
            roots = [tensor for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
            losses = [tensor for tensor in roots if tensor.dim() == 0 and walk([tensor], [None], None).uses]
            values = losses or [_stand_in(tensor) for tensor in roots]
        return _describe(model, values, own_loss=bool(losses))


def _inputs_of(batch: Any) -> Any:
    if isinstance(batch, (tuple, list)) and len(batch) in (1, 2):
        return batch[0]
    if isinstance(batch, (Tensor, Mapping)) or is_object(batch):
        return batch
    size = f" of {len(batch)} elements" if isinstance(batch, (tuple, list)) else ""
    raise BadInput(
        ASKED,
        f"batch of type {type(batch).__name__}{size}",
        "packprop cannot tell which part of it is the input of the model",
        "give (inputs, targets), or inputs alone: a tensor, a dictionary of arguments or an object; several "
        "positional inputs as ((a, b), targets)",
    )


def _stand_in(output: Tensor) -> Tensor:
    """Return a squared error, in place of the loss that the model does not return."""
    real = torch.view_as_real(output) if output.is_complex() else output
    return F.mse_loss(real, torch.zeros_like(real))


def _describe(model: nn.Module, values: Sequence[Tensor], own_loss: bool) -> Coverage:
    """Read the facts about a model's parameters from the graph of some losses."""
    graph, refusal = _walked(values)
    accepted = graph if refusal is None else None
    note = "" if values else "no output of the model requires a gradient"
    if refusal is not None and len(values) > 1:
        first_alone, other = _walked(values[:1])
        if other is None:
            note = f"for a loss on the first output alone; with all of them: {refusal.why}"
            accepted, refusal = first_alone, None
    sites = [(use.name, site) for use in graph.uses for site in use.sites] if graph is not None else []
    uses = _by_tensor((site.leaf, _consumption(name, site.entry, site.leaf)) for name, site in sites)
    missing = _by_tensor((leaf, node.name()) for leaf, node in (graph.missing if graph is not None else ()))
    factors = {} if accepted is None else _factors(accepted)
    routes = {} if accepted is None else _hessian_routes(accepted)
    names = _by_tensor((each, name) for name, each in named_parameters(model, remove_duplicate=False))
    parameters = {
        name: ParameterCoverage(
            name,
            tuple(names[id(parameter)][1:]),
            parameter.shape,
            _layer(model, name),
            parameter.requires_grad,
            tuple(uses[id(parameter)]),
            tuple(missing[id(parameter)]),
            factors.get(id(parameter), ""),
            routes.get(id(parameter), ""),
        )
        for name, parameter in named_parameters(model)
    }
    mixers = () if graph is None else tuple(dict.fromkeys(graph.mixers))
    samples = 0 if accepted is None else accepted.samples
    families = _families_of(accepted, refusal, own_loss, note)
    return Coverage(parameters, families, samples, mixers, refusal)


def _walked(values: Sequence[Tensor]) -> tuple[Graph | None, PackpropError | None]:
    """Return the graph of some losses, and the error that refuses extensions; ``None`` for either if absent."""
    graph = None
    if not values:
        return None, None
    try:
        graph = walk(values, [None] * len(values), None)
        check_graph(graph)
    except PackpropError as refusal:
        return _refused(values) if graph is None else graph, refusal
    return graph, None


def _refused(values: Sequence[Tensor]) -> Graph | None:
    """Return the graph of losses whose walk a rule refused; ``None`` if something else refused it."""
    try:
        with without_rules():
            graph = walk(values, [None] * len(values), None)
    except PackpropError:
        return None
    for use in graph.uses:
        by_rules = dict(zip(map(id, use.entries), use.with_inputs(), strict=True))
        use.sites = [replace(site, entry=by_rules[id(site.entry)]) for site in use.sites]
    return graph


def _by_tensor(pairs: Iterable[tuple[Tensor, Fact]]) -> defaultdict[int, list[Fact]]:
    """Group facts by the identity of the tensor that each is about."""
    found: defaultdict[int, list[Fact]] = defaultdict(list)
    for tensor, fact in pairs:
        found[id(tensor)].append(fact)
    return found


def _consumption(name: str, entry: Entry, leaf: Tensor) -> Consumption:
    refusal = "" if entry.refusal is None else entry.refusal[0]
    fallback = not entry.by_rule and not refusal
    return Consumption(name, entry.structure, entry.parameter is leaf, refusal, fallback)


def _factors(graph: Graph) -> dict[int, str]:
    """Return the Kronecker factors of each leaf, from its structure for one sample without cotangents."""
    structures = _by_tensor(
        (site.leaf, site.structure_of([None] * len(use.shapes), use.layouts, slice(0, 1)))
        for use in graph.uses
        for site in use.sites
    )
    return {leaf: "B" if isinstance(join(own), Dense) else "B, A" for leaf, own in structures.items()}


def _hessian_routes(graph: Graph) -> dict[int, str]:
    """Return the route to each leaf's diagonal of the Hessian; no routes if a branch was already summed."""
    try:
        columns(graph, EXACT, create_graph=False)
        with_roots = True
    except PackpropError:
        with_roots = False
    try:
        routes = choose_routes(graph, with_roots, per_sample=True)
    except PackpropError:
        return {}
    return {id(leaf): _route(graph, routes, leaf) for leaf in graph.leaves()}


def _route(graph: Graph, routes: Routes, leaf: Tensor) -> str:
    route = routes.route(leaf)
    try:
        if route != "swept":
            require_second_derivatives(graph.roots, [leaf], graph.name)
    except PackpropError:
        return "refused"
    return route


def _layer(model: nn.Module, name: str) -> str:
    """Return the class of the layer that owns a parameter, before it was sharded or parametrised."""
    path = name.rpartition(".")[0].partition("parametrizations")[0].rstrip(".")
    kind = class_before_sharding(dict(named_modules(model))[path])
    return (kind.__mro__[1] if kind.__name__.startswith("Parametrized") else kind).__name__


def _families_of(
    graph: Graph | None, refusal: PackpropError | None, own_loss: bool, note: str
) -> tuple[Family, ...]:
    """Return the families of the catalogue, and whether they apply.

    Args:
        graph: The graph of a backward pass; ``None`` if packprop refuses it or there is none.
        refusal: The error that refuses a backward pass with any extension, if there is one.
        own_loss: True if the model returned a loss.
        note: A condition that holds for all families.
    """
    members: dict[str, list[str]] = {name: [] for name in FAMILIES}
    for kind in (getattr(catalogue, name) for name in catalogue.__all__):
        if kind is not Extension and issubclass(kind, Extension):
            seeds = {row.seed for row in kind().rows}
            members[next(name for name, fits in FAMILIES.items() if fits(seeds))].append(kind.__name__)
    return tuple(
        Family(name, tuple(extensions), *_verdict(name, graph, refusal, own_loss, note))
        for name, extensions in members.items()
        if extensions
    )


def _verdict(
    family: str, graph: Graph | None, refusal: PackpropError | None, own_loss: bool, note: str
) -> tuple[bool, str]:
    """Tell whether a family applies, and why not or under which condition."""
    if refusal is not None:
        return False, f"{refusal.where}: {refusal.why}"
    if graph is None or family in ANY_LOSS:
        return graph is not None, note
    if not own_loss:
        return True, "; ".join(filter(None, ["for a recorded loss that is convex in the outputs", note]))
    if not graph.losses or graph.without_loss:
        return False, "the model returns a number that is not the result of a recorded loss function alone"
    refused = [loss.entrance.rule.refusal[0] for loss in graph.losses if loss.entrance.rule.refusal is not None]
    return (False, refused[0]) if refused else (True, note)
