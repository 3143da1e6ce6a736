"""The reduction and the divisor of a batch's loss, which give the batch its weight among others.

# NOTE [Weights of terms]
packprop puts the results of batches together as if the loss were a sum over terms, and divides by the number of
all terms. The divisor of PyTorch's loss function tells how many terms a batch has, but the user may multiply or
divide the loss afterwards: ``F.cross_entropy(f, y, reduction="sum") / len(y)`` is no sum over the terms of all
batches. So packprop reads the weight of each term in the backward pass: the factor on the value of the loss
function, over its divisor. Times the terms of the batch, this weight is the same in all batches of one loss.
Batches of one size may hide that it depends on the size. So if anything follows the loss function, packprop
calls the loss once more on the first batch, with the last sample twice, and compares the weights; if the loss
raises an error there, packprop warns. Options of the loss function, such as weights of classes but no values of
samples, must also be the same in all batches. So must penalties on parameters, which the loss of all samples
has once: packprop compares the norm of their gradient. It does not compare this norm with the last sample
twice: there the model's output is a leaf, and its gradient enters the norm.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packprop.applications.dataset.messages import explanation
from packprop.engine.curvature import factors_on_losses, term_gradients
from packprop.engine.graph import Graph, walk
from packprop.engine.passes import all_terms, is_of_batch, reduction_and_divisor
from packprop.engine.recording import RecordedLoss, record
from packprop.engine.tensors import (
    Layout,
    LossFunction,
    accumulation_dtype,
    map_tensors,
    random_numbers_from,
    random_states,
    together,
)
from packprop.errors import PackpropError, PackpropWarning

TELL = (
    "write it as a module without parameters that takes the model's output and the targets, with an "
    "attribute reduction='mean' or 'sum'; tell what it divides by with @packprop.register_loss(MyLoss); and "
    "extend the module: packprop.extend(MyLoss())"
)
"""Advice on a loss that torch does not define."""

ROUNDING = 4
"""The relative difference of factors on losses that counts as rounding, in units of their precision: 3 % in
bfloat16."""

TERMS = "terms"
"""The name of the weights of terms, among those of the options of loss functions."""

PENALTIES = "penalties"
"""The name of the norm of the gradient of all penalties, among those of the options of loss functions."""

OF_CLASSES = ("weight", "pos_weight")
"""Arguments of loss functions that have a number for each class, or for each sample."""


class LossTerms(NamedTuple):
    """The terms of a batch's loss.

    Args:
        reduction: ``"mean"`` or ``"sum"``.
        divisor: The divisor of the loss. For several means it is the number of samples if all samples have the
            same share in each mean, else ``NaN``.
        weights: Under ``TERMS``, the smallest and the largest weight of a term, times the divisor ``[2]``.
            Under the name of each loss function, numbers that stand for its options, such as weights of
            classes: the smallest and the largest over its calls ``[2, o]``. Under ``PENALTIES``, the norm of
            the gradient of penalties, if there are any. See NOTE [Weights of terms].
    """

    reduction: str
    divisor: Tensor | float
    weights: dict[str, Tensor]


@dataclass
class TermWeights:
    """Weights of terms in the losses of batches, times the terms of a batch; see NOTE [Weights of terms].

    Args:
        own: The weights of ``LossTerms``, each from the first batch that has it; empty without terms.
        of_more: The weights of the first batch with its last sample twice; empty if they are not known.
        rounding: The relative difference that counts as rounding, in the precision of the loss.
        penalties_vary: True if penalties differed between batches.
        told: True if packprop has warned of penalties.
        why_unknown: The reason why ``of_more`` is not known, if the loss refuses the last sample twice.
    """

    own: dict[str, Any] = field(default_factory=dict)
    of_more: dict[str, Any] = field(default_factory=dict)
    rounding: float = 0.0
    penalties_vary: bool = False
    told: bool = False
    why_unknown: str = ""

    def add(self, weights: Mapping[str, Tensor], terms: float) -> None:
        """Add the weights of a batch, whose loss was divided by ``terms``; without terms it has no weights.

        Raises:
            PackpropError: If they differ from those of the batches before.
        """
        found = {name: each.tolist() for name, each in weights.items()} if terms else {}
        if found and all(map(math.isfinite, found[TERMS])):
            self.rounding = max(self.rounding, ROUNDING * torch.finfo(weights[TERMS].dtype).eps)
            self.require(found)
            self.own = {**found, **self.own}

    def require_any_size(self) -> None:
        """Refuse further batches if the weights depend on the number of samples; warn if that is not known.

        Raises:
            PackpropError: If they depend on it.
        """
        if self.why_unknown:
            warnings.warn(
                "The loss of the first batch cannot be computed with its last sample repeated "
                f"({self.why_unknown}). So packprop does not see a factor on the loss that depends on the size "
                "of the batch, as in loss.sum() / len(targets): quantities would then depend on the split of "
                "the data into batches. Leave such a division to the loss function, reduction='mean'.",
                PackpropWarning,
                stacklevel=2,
            )
            self.why_unknown = ""
        if self.of_more:
            self.require({**self.of_more, PENALTIES: self.own.get(PENALTIES)})

    def require(self, other: Mapping[str, Any]) -> None:
        """Refuse weights or options that differ from these; note penalties that do.

        Raises:
            PackpropError: If they differ by more than rounding.
        """
        one, another = self.own.get(PENALTIES), other.get(PENALTIES)
        if self.own and one != another:
            self.penalties_vary |= one is None or another is None or not self._are_close(one, another)
        for name in self.own.keys() & other.keys() - {TERMS, PENALTIES}:
            for least, most, least_now, most_now in zip(*self.own[name], *other[name], strict=True):
                varies = least != most or least_now != most_now  # it differs from call to call
                if not varies and not self._are_close(least, least_now):
                    raise not_one_loss(
                        "an option of a loss function, such as weight or pos_weight",
                        "it differs in another batch, or with the last sample twice: quantities would depend "
                        "on the split of the data into batches",
                        "give the same options in all batches; compute weights of classes from all of the data",
                    )
        for before, now in zip(self.own.get(TERMS, ()), other.get(TERMS, ()), strict=False):
            if not self._are_close(before, now):
                raise not_one_loss(
                    "what follows the loss function",
                    f"it multiplies the loss by {now:.6g}, and by {before:.6g} in another batch or with the "
                    "last sample twice: quantities would depend on the split of the data into batches",
                    "leave the division to the loss function, with reduction='mean' in place of "
                    "reduction='sum' and a division by the size of the batch; multiply by the same number in "
                    "all batches; and add the losses of single samples as sums",
                )

    def settle_penalties(self, reduction: str, of_hessian: bool) -> None:
        """Refuse, or warn of, penalties of several batches that differ between batches or add up.

        Raises:
            PackpropError: If ``of_hessian``: second derivatives of the loss contain penalties.
        """
        if reduction == "sum" and PENALTIES in self.own:
            reduced, effect = "sum", "counts it once for each batch"
            why = "every batch adds it again, and the loss of all samples has it once"
            instead = "leave the penalty out, and add its curvature to the result; or use reduction='mean'"
        elif self.penalties_vary:
            reduced, effect = "mean", "depends on the split of the data into batches"
            why = f"it differs in another batch: the result {effect}"
            instead = (
                "add the same penalty in all batches; or leave it out, and add its curvature to the result"
            )
        else:
            return
        if of_hessian:
            raise not_one_loss(f"a penalty that is added to a {reduced}", why, instead)
        if not self.told:
            self.told = True
            warnings.warn(
                f"Each batch adds a penalty to its {reduced} of losses. The loss of the result {effect}; "
                "gradients of samples, and values computed from them, do not contain it.",
                PackpropWarning,
                stacklevel=2,
            )

    def _are_close(self, one: float, other: float) -> bool:
        return math.isclose(one, other, rel_tol=self.rounding)


def loss_terms(graph: Graph) -> LossTerms:
    """Return the terms of the batch's loss.

    Raises:
        PackpropError: If its divisor is not known, or it is made of means and sums.
    """
    calls = [loss.call for loss in graph.losses]
    if graph.without_loss or not calls:
        raise not_one_loss(
            "the loss of a batch, part of which no loss function makes that packprop knows",
            "nothing tells what that part is divided by, so that batches cannot be given their weight",
            "write it with loss functions of torch, F.mse_loss(a, b) for (a - b).square().mean(), and give "
            f"all of them the same reduction; or {TELL}",
        )
    found = []
    for loss, call in zip(graph.losses, calls, strict=True):
        known = reduction_and_divisor(call, loss.layout)
        if known is None:
            raise not_one_loss(
                f"the loss {call.name}",
                "what it is divided by is not known, so that batches cannot be given their weight",
                "use a loss function of torch with reduction='mean' or reduction='sum', and targets of its "
                f"input's shape; or {TELL}",
            )
        found.append(known)
    if len({reduction for reduction, _ in found}) > 1:
        names = [f"{call.name} ({each})" for call, (each, _) in zip(calls, found, strict=True)]
        raise not_one_loss(
            f"the loss of a batch, made of {', '.join(names)}",
            "a batch has another weight in a mean than in a sum",
            "give all of its loss functions the same reduction",
        )
    reduction, divisor = _together(graph, calls, found)
    factors = {id(loss.call): factor.sum() for loss, factor in factors_on_losses(graph)}
    weights = []
    for call, (_, own) in zip(calls, found, strict=True):
        factor = factors[id(call)]
        if own is not divisor:
            factor = (factor.to(accumulation_dtype(factor.dtype)) * divisor / own).to(factor)
        weights.append(factor.to(graph.roots[0].device))
    ends = torch.stack(torch.stack(weights).aminmax())
    return LossTerms(reduction, divisor, {TERMS: ends, **_options(graph, ends), **_penalties(graph)})


def _penalties(graph: Graph) -> dict[str, Tensor]:
    """Return the norm of the gradient of all terms that no sample enters; nothing if there are none."""
    with graph.hooks.quiet():
        found = term_gradients(graph, [*graph.in_terms.values()])
    dense = [each.to_dense() for each in found if each is not None]
    norms = [torch.linalg.vector_norm(each, dtype=accumulation_dtype(each.dtype)) for each in dense]
    home = graph.roots[0].device
    return {PENALTIES: torch.stack([each.to(home) for each in norms]).norm()} if norms else {}


def _options(graph: Graph, like: Tensor) -> dict[str, Tensor]:
    """Return numbers ``[2, o]`` that stand for options of loss functions, except for values of samples."""
    by_function: dict[str, list[Tensor]] = {}
    for loss in graph.losses:
        if numbers := _options_of(loss.call, loss.layout, like):
            name = f"{getattr(loss.call.function, '__name__', '')} {len(numbers)}"
            by_function.setdefault(name, []).append(torch.stack(numbers))
    return {name: torch.stack(torch.stack(found).aminmax(dim=0)) for name, found in by_function.items()}


def _options_of(call: RecordedLoss, layout: Layout, like: Tensor) -> list[Tensor]:
    given = {str(place): value for place, value in enumerate(call.args[1:])} | call.kwargs
    with contextlib.suppress(ValueError, TypeError):  # of a function without a signature
        given = inspect.signature(call.function).bind(*call.args, **call.kwargs).arguments
    found: list[Tensor] = []
    for name, value in given.items():
        if isinstance(value, (bool, int, float)):
            found.append(torch.full((), float(value), dtype=like.dtype, device=like.device))
        elif name in OF_CLASSES and isinstance(value, Tensor) and _is_shared(value, call.shape, layout):
            flat = value.detach().flatten().to(like)
            places = torch.arange(1, 1 + len(flat), dtype=like.dtype, device=like.device)
            found += [flat.sum(), (flat * places.sqrt()).sum()]
    return found


def _is_shared(weights: Tensor, shape: torch.Size, layout: Layout) -> bool:
    """Tell whether all samples have the same weights, which are broadcast against a loss's input ``shape``."""
    sizes, axes = (*[1] * (len(shape) - weights.dim()), *weights.shape), layout.axes or (0,)
    return weights.shape != shape and (weights.dim() < 2 or all(sizes[a] == 1 != shape[a] for a in axes))


def is_scaled(graph: Graph) -> bool:
    """Tell whether the user computes with the value of the loss function, so that it may have a factor."""
    nodes = {loss.node for loss in graph.losses}
    return any(root.grad_fn not in nodes for root in graph.roots)


def counted_terms(
    graph: Graph, before: TermWeights, loss: LossFunction | None, outputs: Any, targets: Any
) -> tuple[str, float, dict[str, Tensor]]:
    """Return reduction, divisor and weights of a batch's loss; compare the weights with those before.

    See NOTE [Weights of terms].

    Args:
        graph: The graph of the batch.
        before: The weights in the batches before; those of the batch are added to them.
        loss: Called as ``loss(outputs, targets)``; ``None`` if the model computes it.
        outputs: The model's outputs for the batch, if anything follows the loss function; else ``None``.
        targets: The targets of the batch.

    Raises:
        PackpropError: If the divisor is not known, or the weights differ.
    """
    reduction, divisor, weights = loss_terms(graph)
    terms, is_first = number_of_terms(divisor), not before.own
    before.add(weights, terms)
    if is_first and loss is not None and outputs is not None:
        try:
            before.of_more = _weights_of_more(loss, outputs, targets, graph.samples)
        except Exception as error:  # the user's loss may refuse these rows in any way
            before.why_unknown = explanation(error)
    return reduction, terms, weights


def _weights_of_more(loss: LossFunction, outputs: Any, targets: Any, samples: int) -> dict[str, Any]:
    """Return the weights of the loss with the last sample twice; see NOTE [Weights of terms].

    The loss may raise any error if outputs and targets do not have a row for each sample.
    """

    def more(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return torch.cat([tensor, tensor[-1:]]) if tensor.dim() and len(tensor) == samples else tensor

    def computed(tensor: Tensor) -> Tensor:  # like the model's outputs: packprop records no losses of leaves
        return more(tensor).requires_grad_().clone() if tensor.is_floating_point() else more(tensor)

    with torch.enable_grad(), record(), random_numbers_from(random_states()):
        value = loss(map_tensors(computed, outputs), together(map_tensors(more, targets)))
    graph = walk([value], [None], None)
    graph.samples = samples + 1
    found = {name: each.tolist() for name, each in loss_terms(graph).weights.items()}
    return found if all(map(math.isfinite, found[TERMS])) else {}


def _together(
    graph: Graph, calls: Sequence[RecordedLoss], found: Sequence[tuple[str, Tensor | float]]
) -> tuple[str, Tensor | float]:
    """Return the reduction and the divisor of a loss that several loss functions make up."""
    if len(found) == 1 or found[0][0] == "sum":
        return found[0]
    pairs = zip(calls, found, strict=True)
    whole = [each[1] == all_terms(call) or is_of_batch(call, *each) for call, each in pairs]
    tensors = [each for each in whole if isinstance(each, Tensor)]
    if not all(each for each in whole if not isinstance(each, Tensor)):
        return "mean", math.nan
    if not tensors:
        return "mean", float(graph.samples)
    each_has_its_part = torch.stack([each.cpu() for each in tensors]).all()
    return "mean", torch.where(each_has_its_part, float(graph.samples), math.nan)


def number_of_terms(divisor: Tensor | float) -> float:
    """Return the divisor of a batch's loss as a number.

    Raises:
        PackpropError: If it is ``NaN``.
    """
    terms = float(divisor)
    if math.isnan(terms):
        raise not_one_loss(
            "the loss of a batch, made of several means",
            "in one of them some samples count more than others (targets that are ignored, weights), so that "
            "the batch has another weight in this mean than in the others",
            "give all loss functions reduction='sum', and divide by numbers that are the same in all "
            "batches; or ask for one loss after the other",
        )
    return terms


def require_same_weights(weights: Sequence[TermWeights]) -> None:
    """Refuse the losses of ranks if the weights of their terms differ."""
    known = [each for each in weights if each.own]
    for each in known[1:]:
        each.require_any_size()
        known[0].require_any_size()
        known[0].require(each.own)


def two_reductions(first: str, second: str) -> PackpropError:
    """Return the error about batches that reduce their losses in two ways."""
    return not_one_loss(
        f"a loss that reduces by {first}, then by {second}",
        "the two are not parts of one loss over all samples",
        "use the same loss for every batch",
    )


def not_one_loss(where: str, why: str, instead: str) -> PackpropError:
    """Return an error about losses of batches."""
    return PackpropError("Quantities of a loss over several batches were asked for.", where, why, instead)
