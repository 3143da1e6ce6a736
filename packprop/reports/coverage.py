"""Which function uses each parameter, how, and what can be asked for: from one forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packprop import extensions as catalogue
from packprop.algebra.structures import Dense, join
from packprop.curvature.routes import Routes, choose_routes
from packprop.curvature.second_order import require_second_derivatives
from packprop.curvature.seeds import columns
from packprop.errors import BadInput, PackpropError
from packprop.functions.entry import Entry
from packprop.functions.losses.description import describe
from packprop.graph.graph import Graph
from packprop.graph.samples import check_graph
from packprop.graph.search import leaves_above, nodes_above
from packprop.graph.walk import walk
from packprop.recording.marks import EXTENDED, HANDLES, MIXES, USE, RecordedUse, marks_of
from packprop.recording.switch import extend, is_extended, record
from packprop.reports.coverage_values import Consumption, Coverage, Family, ParameterCoverage
from packprop.tensors.nesting import tensors_in
from packprop.tensors.random import random_states, set_random_states
from packprop.types import ENTRYWISE, EXACT, GRADIENT, GRAPH, INPUTS, Extension, Seed

ASKED = "coverage(model, batch) was called."


def coverage(model: nn.Module, batch: Any) -> Coverage:
    """Say which function uses each parameter, its structure, and which extensions apply.

    One forward pass in the model's own mode, with a squared error on its outputs in place of a
    loss, unless the model returns a loss. Nothing of the user's is changed: buffers, attributes and
    the random state are put back, and the model is extended for this pass only. The user's own
    forward hooks do run.

    Args:
        model: Any module; need not be extended.
        batch: ``(inputs, targets)`` as a data loader yields it, or inputs alone: a tensor, or a
            dictionary of arguments. Several positional inputs: ``((a, b), targets)``. Targets are
            not looked at.

    Returns:
        A value that prints.

    Raises:
        BadInput: If ``model`` is no module or not initialised, or ``batch`` is none of the above.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> found = coverage(model, torch.zeros(5, 4))
        >>> [use.function for use in found.parameters["0.weight"].uses], found.samples
        (['linear'], 5)
    """
    inputs = _inputs_of(batch)
    with _as_it_was(model), torch.enable_grad():
        with record():
            outputs = _call(model, inputs)
            roots = [tensor for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
            losses = [tensor for tensor in roots if tensor.dim() == 0]
            values = losses or [_stand_in(tensor) for tensor in roots]
        return _describe(model, values, own_loss=bool(losses))


def _inputs_of(batch: Any) -> Any:
    if isinstance(batch, (tuple, list)) and len(batch) in (1, 2):
        return batch[0]
    if isinstance(batch, (Tensor, dict)):
        return batch
    size = f" of {len(batch)} elements" if isinstance(batch, (tuple, list)) else ""
    raise BadInput(
        ASKED,
        f"batch of type {type(batch).__name__}{size}",
        "it is not clear what of it goes into the model",
        "give (inputs, targets), or inputs alone: a tensor or a dictionary of arguments; several "
        "positional inputs as ((a, b), targets)",
    )


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def _stand_in(output: Tensor) -> Tensor:
    """A loss with a rule, in place of one that is not there."""
    real = torch.view_as_real(output) if output.is_complex() else output
    return F.mse_loss(real, torch.zeros_like(real))


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Extend a model for a while; put back its buffers, its attributes and the random state."""
    if not isinstance(model, nn.Module):
        extend(model)  # says what is wrong
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise BadInput(
                ASKED,
                f"parameter {name!r}",
                "it is not initialised, and the pass would initialise it",
                "run one forward pass first",
            )
    modules = list(model.modules())
    attributes = [
        (module, dict(vars(module)), dict(module.named_buffers(recurse=False, remove_duplicate=False)))
        for module in modules
    ]
    # look-ups with max_norm are the one function of torch that writes into a parameter
    values = [
        (parameter, parameter.detach().clone())
        for module in modules
        if getattr(module, "max_norm", None) is not None
        for parameter in module.parameters(recurse=False)
    ]
    fresh = [module for module in modules if not is_extended(module)]
    known, state = model in EXTENDED, random_states()
    copies: dict[int, Tensor] = {}
    for module, _, buffers in attributes:
        for name, buffer in buffers.items():
            setattr(module, name, copies.setdefault(id(buffer), buffer.detach().clone()))
    extend(model)
    try:
        yield
    finally:
        for module in fresh:
            for handle in vars(module).pop(HANDLES, ()):
                handle.remove()
        if not known:
            EXTENDED.discard(model)
        for module, own, buffers in attributes:
            vars(module).clear()
            vars(module).update(own)
            for name, buffer in buffers.items():
                setattr(module, name, buffer)
        for parameter, value in values:
            parameter.data.copy_(value)
        set_random_states(state)


def _describe(model: nn.Module, values: Sequence[Tensor], own_loss: bool) -> Coverage:
    """What the graph of some losses says about the parameters of a model."""
    graph, refusal = _walked(values)
    located = graph
    note = "" if values else "no output of the model requires a gradient"
    if refusal is not None and len(values) > 1:
        alone, other = _walked(values[:1])
        if other is None:
            note = f"for a loss on the first output alone; with all of them: {refusal.why}"
            located, refusal = alone, None
    uses = _sites(values, graph)
    missing: dict[int, list[str]] = {}
    for leaf, node in graph.missing if graph is not None else ():
        missing.setdefault(id(leaf), []).append(node.name())
    known = located is not None and refusal is None
    factors = _factors(located) if located is not None and known else {}
    hessians = _hessians(located) if located is not None and known else {}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = {
        name: ParameterCoverage(
            name,
            tuple(names[id(parameter)][1:]),
            parameter.shape,
            _layer(model, name),
            parameter.requires_grad,
            tuple(uses.get(id(parameter), ())),
            tuple(missing.get(id(parameter), ())),
            factors.get(id(parameter), ""),
            hessians.get(id(parameter), ""),
        )
        for name, parameter in model.named_parameters()
    }
    mixers = tuple(dict.fromkeys(mark for mark in _marks(values, MIXES)))
    samples = located.samples if located is not None and refusal is None else 0
    families = _families(located, refusal, own_loss, note)
    return Coverage(found, families, samples, mixers, refusal)


def _walked(values: Sequence[Tensor]) -> tuple[Graph | None, PackpropError | None]:
    """The graph of some losses, and why a backward pass with extensions would be refused."""
    graph = None
    if not values:
        return None, None
    try:
        graph = walk(values, [None] * len(values), None)
        check_graph(graph)
    except PackpropError as refusal:
        return graph, refusal
    return graph, None


def _sites(values: Sequence[Tensor], graph: Graph | None) -> dict[int, list[Consumption]]:
    """Uses of each leaf: by the walk, or where it gave up by the marks that recording left."""
    if graph is not None:
        triples = [(f.recorded, site.entry, site.leaf) for f in graph.uses for site in f.sites]
    else:
        triples = [
            (use, entry, leaf)
            for use in dict.fromkeys(use for marks in _marks(values, USE) for use, *_ in marks)
            for entry in use.entries or ()
            for leaf in _leaves(entry.parameter)
        ]
    uses: dict[int, list[Consumption]] = {}
    for use, entry, leaf in triples:
        uses.setdefault(id(leaf), []).append(_consumption(use, entry, leaf))
    return uses


def _consumption(use: RecordedUse, entry: Entry, leaf: Tensor) -> Consumption:
    refusal = "" if entry.refusal is None else entry.refusal[0]
    return Consumption(use.name, entry.structure, entry.parameter is leaf, refusal)


def _marks(values: Sequence[Tensor], mark: str) -> list[Any]:
    found = (marks_of(node) for node in nodes_above(value.grad_fn for value in values))
    return [marks[mark] for marks in found if mark in marks]


def _leaves(parameter: Tensor) -> list[Tensor]:
    if parameter.grad_fn is None:
        return [parameter]
    return leaves_above(parameter)


def _factors(graph: Graph) -> dict[int, str]:
    """Which Kronecker factors each leaf gets: by its structure for one sample, without cotangents."""
    parts: dict[int, list[Any]] = {}
    for found in graph.uses:
        nothing: list[Tensor | None] = [None] * len(found.recorded.shapes)
        for site in found.sites:
            structure = site.structure_of(nothing, found.layouts, slice(0, 1))
            parts.setdefault(id(site.leaf), []).append(structure)
    return {leaf: "B" if isinstance(join(structures), Dense) else "B, A" for leaf, structures in parts.items()}


def _hessians(graph: Graph) -> dict[int, str]:
    """The way of each leaf's diagonal of the Hessian; none where a branch was summed already."""
    try:
        columns(graph, EXACT, create_graph=False)
        with_roots = True
    except PackpropError:
        with_roots = False
    try:
        chosen = choose_routes(graph, with_roots, per_sample=True)
    except PackpropError:
        return {}
    return {id(leaf): _route(graph, chosen, leaf) for leaf in graph.leaves()}


def _route(graph: Graph, chosen: Routes, leaf: Tensor) -> str:
    route = chosen.route(leaf)
    try:
        if route != "swept":
            require_second_derivatives(graph.roots, [leaf], graph.name)
    except PackpropError:
        return "refused"
    return route


def _layer(model: nn.Module, name: str) -> str:
    """Class of the layer that owns a parameter, before it was parametrised."""
    path = name.rpartition(".")[0].partition("parametrizations")[0].rstrip(".")
    kind = type(model.get_submodule(path))
    shown = kind.__mro__[1] if kind.__name__.startswith("Parametrized") else kind
    return shown.__name__


NAMES: dict[str, Callable[[set[Seed]], bool]] = {
    "gradients of samples": lambda seeds: seeds == {GRADIENT},
    "Hessian diagonals": lambda seeds: all(seed.kind in ("hessian", "hessian_mc") for seed in seeds),
    "Jacobians": lambda seeds: all(seed.kind == "jacobian" for seed in seeds),
    "GGN, exact": lambda seeds: seeds in ({EXACT}, {ENTRYWISE}),
    "GGN, sampled": lambda seeds: all(seed.mc_samples is not None for seed in seeds),
    "Kronecker factors": lambda seeds: INPUTS in seeds,
    "products": lambda seeds: seeds == {GRAPH},
    "others": lambda seeds: True,
}


ANY_LOSS = ("gradients of samples", "Hessian diagonals", "Jacobians")
"""Families by their seeds; an extension belongs to the first that fits."""


def _families(
    graph: Graph | None, refusal: PackpropError | None, own_loss: bool, note: str
) -> tuple[Family, ...]:
    members: dict[str, list[str]] = {name: [] for name in NAMES}
    for kind in (getattr(catalogue, name) for name in catalogue.__all__):
        if kind is not Extension and issubclass(kind, Extension):
            seeds = {row.seed for row in kind().rows}
            members[next(name for name, fits in NAMES.items() if fits(seeds))].append(kind.__name__)
    families = []
    for name, kinds in members.items():
        if not kinds:
            continue
        family = Family(name, tuple(kinds), refusal is None and graph is not None, note)
        if refusal is not None:
            family = replace(family, why=f"{refusal.where}: {refusal.why}")
        elif name not in ANY_LOSS and graph is not None:
            family = _with_loss(family, graph, own_loss)
        families.append(family)
    return tuple(families)


def _with_loss(family: Family, graph: Graph, own_loss: bool) -> Family:
    """Curvature is that of a loss: the model's own, or one that is not known here."""
    if not own_loss:
        condition = "for a recorded loss that is convex in the outputs"
        return replace(family, why="; ".join(filter(None, [condition, family.why])))
    if not graph.losses or graph.without_loss:
        why = "the model returns a number that no recorded loss function alone has made"
        return replace(family, applies=False, why=why)
    for loss in graph.losses:
        rule = describe(loss.call.function, loss.call.args, loss.call.kwargs)
        if rule.refusal is not None:
            return replace(family, applies=False, why=rule.refusal[0])
    return family
