"""Families of extensions that apply, by the seeds of their rows."""

from __future__ import annotations

from collections.abc import Callable

from packprop import extensions as catalogue
from packprop.applications.reports.coverage_values import Family
from packprop.engine.graph import Graph
from packprop.errors import PackpropError
from packprop.types import ENTRYWISE, EXACT, GRADIENT, GRAPH, INPUTS, Extension, Seed

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
"""The seeds of each family's extensions; an extension belongs to the first family that fits."""

ANY_LOSS = ("gradients of samples", "Hessian diagonals", "Jacobians")
"""Families that need nothing from the loss."""


def families_of(
    graph: Graph | None, refusal: PackpropError | None, own_loss: bool, note: str
) -> tuple[Family, ...]:
    """Return the families of the catalogue, and whether they apply.

    Args:
        graph: The graph of a backward pass; none if the walk failed.
        refusal: The reason to refuse a backward pass with any extension, if there is one.
        own_loss: Says that the model returned a loss.
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
    """Tell whether a family applies, and why not or under which condition; see ``families_of``."""
    if refusal is not None:
        return False, f"{refusal.where}: {refusal.why}"
    if graph is None or family in ANY_LOSS:
        return graph is not None, note
    if not own_loss:
        return True, "; ".join(filter(None, ["for a recorded loss that is convex in the outputs", note]))
    if not graph.losses or graph.without_loss:
        return False, "the model returns a number that no recorded loss function alone has made"
    refused = [loss.entrance.rule.refusal[0] for loss in graph.losses if loss.entrance.rule.refusal is not None]
    return (False, refused[0]) if refused else (True, note)
