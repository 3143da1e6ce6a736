"""Bounds on the gradients of single samples: which parameters share one, and what a sample's own loss is.

# NOTE [Clipping]
By what a sample's gradient is multiplied is known when its norm over all parameters of a bound is: when the
sweep is over. From there on no sweep is needed. The clipped gradient of a parameter is the sum over samples of
what they contribute, each times its factor; and the inputs and cotangents that norms were taken of tell what
they contribute. So these are kept until then, and the gradient of a weight, which autograd's own pass would
have computed along the way, is computed once, from scaled cotangents. Where gradients of samples take no more
memory than the cotangents, or are formed for their norms and take no more than inputs and cotangents, they are
kept instead. Norms are those of Goodfellow (2015); keeping cotangents is the book-keeping of Bu et al. (2023).
Of probe rows neither norms nor sums are taken; see NOTE [Probe rows].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from packprop.engine.loss_terms import reduction_of
from packprop.engine.probes import Groups, require_no_other_pass
from packprop.errors import BadInput, PackpropError
from packprop.graph.graph import Graph
from packprop.tensors.names import named_modules, named_parameters

Per = Literal["all", "module", "parameter"]
"""What shares a bound: all parameters, those of a module, or nothing."""

Reduction = Literal["mean", "sum"]
"""What a loss is of the losses of its samples."""

ASKED = "clipped_gradients(...) was asked for."
"""What errors say was asked for."""

INSTEAD = "leave it out, or clip the rows of BatchGrad by hand"
"""What errors say to do."""


class Group(NamedTuple):
    """Parameters that share a bound.

    ``name``: of their module or of the one parameter; empty for all.
    """

    name: str
    leaves: list[Tensor]
    max_norm: float | Tensor


@dataclass(frozen=True)
class Clipping:
    """What is asked for, before a graph is known.

    Args:
        max_norm: The bound, or a bound for each module or parameter by name.
        per: What shares a bound.
        reduction: What the loss is of the losses of its samples; ``None`` for what the loss function says.
        loss_scale: What the loss that is meant was multiplied by; ``None`` for 1.
        tell: Called with norms and factors of each pass.
    """

    max_norm: float | Tensor | Mapping[str, float]
    per: Per
    reduction: Reduction | None
    loss_scale: float | Tensor | None
    tell: Callable[[ClippedNorms], None]

    asked = ASKED

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        for argument, value, known in (
            ("per", self.per, get_args(Per)),
            ("reduction", self.reduction, (None, *get_args(Reduction))),
        ):
            if value not in known:
                words = ", ".join(map(repr, known))
                raise BadInput(ASKED, f"{argument}={value!r}", f"it is none of {words}", f"give one of {words}")
        bounds: Any = self.max_norm
        if isinstance(bounds, Mapping):
            if self.per == "all":
                raise BadInput(
                    ASKED,
                    "max_norm, a bound for each name",
                    "with per='all' there is one bound",
                    "give a number, or per='module' or per='parameter'",
                )
        else:
            bounds = {"": bounds}
        for name, bound in bounds.items():
            if not _is_bound(bound):
                raise BadInput(
                    ASKED,
                    f"max_norm={bound!r}" + (f" for {name!r}" if name else ""),
                    "it is no positive number, nor a tensor of one",
                    "give the largest norm that a sample's gradient may have, as in max_norm=1.0",
                )


@dataclass(frozen=True)
class Clip:
    """The bounds of one pass.

    Args:
        groups: Parameters that share a bound; each parameter is in one.
        own: What a sample's part of the loss is multiplied by to become its own loss.
        tell: Called with norms and factors when they are known.
        training: Training rows and probes, if there are any; the samples below are then training rows.
    """

    groups: list[Group]
    own: float | Tensor
    tell: Callable[[ClippedNorms], None]
    training: Groups | None = None

    def scaled(self, factors: Tensor) -> Tensor:
        """What parts of samples are multiplied by ``[n]``: by their factors, to the scale of training rows."""
        scale = 1.0 if self.training is None else self.training.of_training
        return factors * (scale.to(factors.device) if isinstance(scale, Tensor) else scale)


class ClippedNorms(NamedTuple):
    """What was found out about the samples of one pass.

    Args:
        norms: Norms of the gradients of samples' own losses in the parameters of each group, ``[g, n]``.
        factors: What these were multiplied by, ``[g, n]``.
        bounds: The bounds of the groups, ``[g]``.
        groups: The groups.
    """

    norms: Tensor
    factors: Tensor
    bounds: Tensor
    groups: list[Group]


def settled(clipping: Clipping, graph: Graph, is_plain: bool, training: Groups | None = None) -> Clip:
    """The bounds of a pass through a graph whose samples are located.

    Args:
        clipping: What was asked for.
        graph: The graph.
        is_plain: Whether the pass is ``backward()`` without options, and not traced.
        training: Training rows and probes, if there are any.

    Raises:
        BadInput: If there is no bound for a module or parameter, or one for none.
        PackpropError: For what gradients cannot be clipped in, with its name.
    """
    if not is_plain:
        raise PackpropError(
            ASKED,
            "backward(create_graph=True), backward(inputs=...) or a compiled step",
            "clipped gradients are summed apart from that pass",
            "call backward() alone; leave parameters out by requires_grad=False",
        )
    if graph.units:
        raise PackpropError(
            ASKED,
            "parameters that fully_shard has sharded",
            "their gradients are handed to the shards by its own backward pass alone",
            "use DistributedDataParallel, where each process clips its own samples",
        )
    require_no_other_pass(graph, ASKED, INSTEAD)
    for leaf in graph.leaves():
        if leaf.is_complex():
            raise PackpropError(
                ASKED,
                f"parameter {graph.name(leaf)!r}, of {leaf.dtype}",
                "norms are taken of gradients of real parameters",
                "make it real, as w = nn.Parameter(torch.view_as_real(w)), and use torch.view_as_complex(w) in "
                "the forward pass",
            )
    recorded = _recorded_reduction(graph, clipping.reduction)
    own: float | Tensor = graph.samples if _reduction(clipping, recorded) == "mean" else 1
    if training is not None:
        # a mean of the caller's own keeps its scale: it is one over probes, too
        own = (len(training.training) if own != 1 and recorded == "mean" else own) * training.of_training
    if clipping.loss_scale is not None:
        own = own / clipping.loss_scale
    return Clip(_groups(clipping, graph), own, clipping.tell, training)


def clip_factors(clip: Clip, squares: list[Tensor]) -> ClippedNorms:
    """Norms of samples' own gradients, and the factors of these, from the squares for each group ``[n]``.

    Factors are NaN where norms are not finite or the bound is not positive: so are the clipped sums then.
    """
    home = squares[0].device
    own = clip.own.to(home) if isinstance(clip.own, Tensor) else clip.own
    norms = torch.stack([square.to(home) for square in squares]).sqrt() * own
    bounds = torch.stack(
        [torch.as_tensor(each.max_norm, dtype=norms.dtype, device=home).reshape(()) for each in clip.groups]
    )
    # a bound of a tensor is looked at here alone; squares of finite gradients may overflow
    is_known = (bounds > 0)[:, None] & norms.isfinite()
    factors = (bounds[:, None] / norms).clamp(max=1).where(is_known, torch.nan)
    return ClippedNorms(norms, factors, bounds, clip.groups)


def _groups(clipping: Clipping, graph: Graph) -> list[Group]:
    leaves, bounds = graph.leaves(), clipping.max_norm
    if clipping.per == "all":
        assert not isinstance(bounds, Mapping)
        return [Group("", leaves, bounds)]
    names = graph.distinct_names("clipped_gradients")
    by_name: dict[str, list[Tensor]] = {}
    for leaf in leaves:
        name = names[id(leaf)]
        by_name.setdefault(name.rpartition(".")[0] if clipping.per == "module" else name, []).append(leaf)
    if not isinstance(bounds, Mapping):
        return [Group(name, own, bounds) for name, own in by_name.items()]
    for name in by_name:
        if name not in bounds:
            raise BadInput(
                ASKED,
                f"{clipping.per} {name!r}",
                "max_norm has no bound for it",
                f"add max_norm[{name!r}], or give one number for each {clipping.per}",
            )
    known = {name for module in graph.modules for name, _ in _named(module, clipping.per)} | {*by_name}
    for name in bounds:
        if name not in known:
            raise BadInput(
                ASKED,
                f"max_norm[{name!r}]",
                f"there is no {clipping.per} of this name",
                f"give bounds for {', '.join(map(repr, by_name))}",
            )
    return [Group(name, own, bounds[name]) for name, own in by_name.items()]


def _named(module: torch.nn.Module, per: Per) -> list[tuple[str, Any]]:
    return [*named_modules(module)] if per == "module" else [*named_parameters(module)]


def _recorded_reduction(graph: Graph, given: Reduction | None) -> Reduction | None:
    """What the loss is of the losses of its samples, if all of its loss functions say the same.

    Raises:
        BadInput: If one of them says something else than what was given.
    """
    found = set()
    for call in [loss.call for loss in graph.losses]:
        known = None if call.released else reduction_of(call)
        found.add(known)
        if given is not None and known is not None and known != given:
            by_hand, scale = ("divided", "1 / N") if known == "sum" else ("multiplied", "N")
            raise BadInput(
                ASKED,
                f"reduction={given!r}, and the loss {getattr(call.function, '__name__', call.function)}",
                f"it is a {known} over samples: norms would be those of another loss",
                f"leave reduction out; where the loss is {by_hand} by its N samples by hand, give "
                f"loss_scale={scale}; losses of both kinds in one pass need one reduction",
            )
    if graph.open or graph.without_loss or len(found) != 1 or None in found:
        return None
    return found.pop()


def _reduction(clipping: Clipping, recorded: Reduction | None) -> Reduction:
    """What the loss is of the losses of its samples: as given, or as its loss functions say."""
    found = clipping.reduction or recorded
    if found is None:
        raise BadInput(
            ASKED,
            "the loss",
            "whether it is the mean or the sum of its samples' losses is not known: no loss function of torch "
            "with reduction='mean' or 'sum' was recorded, or different ones were",
            "say which, as in clipped_gradients(..., reduction='mean'), or packprop.extend(loss_function)",
        )
    return found


def _is_bound(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= math.inf
