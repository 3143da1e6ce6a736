"""Bounds on the gradients of single samples: parameters that share a bound, and the scale of a sample's loss.

# NOTE [Clipping]
The factor of a sample depends on its norm over all parameters that share a bound, so packprop knows it only
when the sweep is over. It needs no second sweep. The clipped gradient of a parameter is the sum of the
gradients of samples, each times its factor, and the inputs and cotangents of the first sweep determine these
gradients. packprop keeps them until the factors are known, and then computes the gradient of a weight once,
from scaled cotangents; autograd does not compute it. packprop keeps per-sample gradients instead where they
take no more memory than the cotangents, or where the norms need them anyway and they take no more memory than
inputs and cotangents. The norms are those of Goodfellow (2015); keeping cotangents is the book-keeping of
Bu et al. (2023). packprop takes neither norms nor sums of probe rows; see NOTE [Probe rows].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from packprop.engine.graph.graph import Graph
from packprop.engine.passes.loss_terms import reduction_of
from packprop.engine.passes.probes import Groups, require_no_other_pass
from packprop.engine.tensors.names import named_modules, named_parameters
from packprop.engine.tensors.precision import widest
from packprop.errors import BadInput, PackpropError

Per = Literal["all", "module", "parameter"]
"""The parameters that share a bound: all parameters, the parameters of a module, or each one by itself."""

Reduction = Literal["mean", "sum"]
"""A loss as the mean or the sum of the losses of its samples."""

ASKED = "clipped_gradients(...) was asked for."
"""The request that errors name."""

INSTEAD = "leave it out, or clip the rows of BatchGrad by hand"
"""The advice that errors give."""


class Group(NamedTuple):
    """Parameters that share a bound.

    ``name``: the name of their module, or of the one parameter; empty for all parameters.
    """

    name: str
    leaves: list[Tensor]
    max_norm: float | Tensor


@dataclass(frozen=True)
class Clipping:
    """The request for clipped gradients, before a graph is known.

    Args:
        max_norm: The bound, or a bound for each module or parameter by name.
        per: The parameters that share a bound.
        reduction: Whether the loss is the mean or the sum of the losses of its samples; ``None`` to take it
            from the loss function.
        loss_scale: The factor on the loss; ``None`` for 1.
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
                    "it is no positive number, and no tensor with one entry",
                    "give the largest norm that a sample's gradient may have, as in max_norm=1.0",
                )


@dataclass(frozen=True)
class Clip:
    """The bounds of one pass.

    Args:
        groups: Parameters that share a bound; each parameter is in one group.
        own: The factor that turns a sample's part of the loss into the sample's own loss.
        tell: Called with norms and factors when they are known.
        training: Training rows and probes, if there are probes. Norms and factors are then those of training
            rows.
    """

    groups: list[Group]
    own: float | Tensor
    tell: Callable[[ClippedNorms], None]
    training: Groups | None = None

    def scaled(self, factors: Tensor) -> Tensor:
        """Return the factors ``[n]`` on the samples' parts of the loss, at the scale of training rows."""
        scale = 1.0 if self.training is None else self.training.of_training
        return factors * (scale.to(factors.device) if isinstance(scale, Tensor) else scale)


class ClippedNorms(NamedTuple):
    """Norms and factors of the samples of one pass.

    Args:
        norms: Norms of the gradients of samples' own losses in the parameters of each group, ``[g, n]``.
        factors: The factors on these gradients, ``[g, n]``.
        bounds: The bounds of the groups, ``[g]``.
        groups: The groups.
    """

    norms: Tensor
    factors: Tensor
    bounds: Tensor
    groups: list[Group]


def settled(clipping: Clipping, graph: Graph, is_plain: bool, training: Groups | None = None) -> Clip:
    """Return the bounds of a pass through a graph whose samples are located.

    Args:
        clipping: The request.
        graph: The graph.
        is_plain: Whether the pass is ``backward()`` without options, and not traced.
        training: Training rows and probes, if there are probes.

    Raises:
        BadInput: If a module or parameter has no bound, or a bound has no module or parameter.
        PackpropError: For passes and parameters whose gradients cannot be clipped.
    """
    if not is_plain:
        raise PackpropError(
            ASKED,
            "backward(create_graph=True), backward(inputs=...) or a compiled step",
            "packprop computes clipped gradients outside of autograd's own pass, where options have no effect",
            "call backward() alone; leave parameters out by requires_grad=False",
        )
    if graph.units:
        raise PackpropError(
            ASKED,
            "parameters that fully_shard has sharded",
            "only its own backward pass hands gradients to the shards",
            "use DistributedDataParallel, where each process clips its own samples",
        )
    require_no_other_pass(graph, ASKED, INSTEAD)
    for leaf in graph.leaves():
        if leaf.is_complex():
            raise PackpropError(
                ASKED,
                f"parameter {graph.name(leaf)!r}, of {leaf.dtype}",
                "packprop takes norms of gradients of real parameters only",
                "make it real, as w = nn.Parameter(torch.view_as_real(w)), and use torch.view_as_complex(w) in "
                "the forward pass",
            )
    recorded = _recorded_reduction(graph, clipping.reduction)
    own: float | Tensor = graph.samples if _reduction(clipping, recorded) == "mean" else 1
    if training is not None:
        # a mean that the user takes by hand keeps its scale: its divisor counts the probes
        own = (len(training.training) if own != 1 and recorded == "mean" else own) * training.of_training
    if clipping.loss_scale is not None:
        scale = clipping.loss_scale
        own = own / (widest(scale, scale.device) if isinstance(scale, Tensor) else scale)
    return Clip(_groups(clipping, graph), own, clipping.tell, training)


def clip_factors(clip: Clip, squares: list[Tensor]) -> ClippedNorms:
    """Return norms of samples' own gradients, and their factors, from the squares for each group ``[n]``.

    Factors are NaN where norms are not finite or the bound is not positive; the clipped sums are then NaN.
    """
    home = squares[0].device
    own = clip.own.to(home) if isinstance(clip.own, Tensor) else clip.own
    norms = torch.stack([square.to(home) for square in squares]).sqrt() * own
    bounds = torch.stack(
        [torch.as_tensor(each.max_norm, dtype=norms.dtype, device=home).reshape(()) for each in clip.groups]
    )
    # nothing else checks a bound that is a tensor; squares of finite gradients may overflow
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
    """Return whether the loss is a mean or a sum over its samples, if all of its loss functions agree.

    Raises:
        BadInput: If one of them does not agree with the given reduction.
    """
    found = set()
    for call in [loss.call for loss in graph.losses]:
        known = None if call.released else reduction_of(call)
        found.add(known)
        if given is not None and known is not None and known != given:
            by_hand, scale = ("divided", "1 / N") if known == "sum" else ("multiplied", "N")
            raise BadInput(
                ASKED,
                f"reduction={given!r}, and the loss {call.name}",
                f"it is a {known} over samples: norms would be those of another loss",
                f"leave reduction out; where the loss is {by_hand} by its N samples by hand, give "
                f"loss_scale={scale}; losses of both kinds in one pass need one reduction",
            )
    if graph.open or graph.without_loss or len(found) != 1 or None in found:
        return None
    return found.pop()


def _reduction(clipping: Clipping, recorded: Reduction | None) -> Reduction:
    """Return whether the loss is a mean or a sum over its samples: as given, or as its loss functions say."""
    found = clipping.reduction or recorded
    if found is None:
        raise BadInput(
            ASKED,
            "the loss",
            "it is not known whether it is the mean or the sum of its samples' losses: packprop recorded no "
            "loss function of torch with reduction='mean' or 'sum', or several with different reductions",
            "say which, as in clipped_gradients(..., reduction='mean'), or packprop.extend(loss_function)",
        )
    return found


def _is_bound(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) <= math.inf
