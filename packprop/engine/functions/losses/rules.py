"""The rules of torch's loss functions, and torch's functions that call a loss; only this file names them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packprop.engine.functions.losses.description import Loss, Root, Rule, add_rule
from packprop.engine.functions.losses.links import EXPONENTIAL, LOG_SOFTMAX, SIGMOID
from packprop.engine.functions.losses.roots import bernoulli_root, gaussian_root, poisson_root, softmax_root
from packprop.engine.tensors.precision import accumulation_dtype


def _rule_of(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Register a rule that takes the arguments of a loss function by name, without torch's deprecated flags."""

    def register(rule: Rule) -> Rule:
        for function in functions:
            add_rule(functools.partial(_described, rule, [*inspect.signature(function).parameters]), function)
        return rule

    return register


def _described(rule: Rule, names: Sequence[str], *args: Any, **kwargs: Any) -> Loss:
    given = {**dict(zip(names, args, strict=False)), **kwargs}  # torch has accepted the arguments
    size_average, reduce = given.pop("size_average", None), given.pop("reduce", None)
    if size_average is not None or reduce is not None:
        given["reduction"] = "none" if reduce is False else "sum" if size_average is False else "mean"
    return rule(**given)


@_rule_of(F.cross_entropy)
def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Loss:
    if target.dtype == torch.uint8:  # torch takes an index of bytes for a mask, and -100 for 156 among bytes
        terms = _cross_entropy(input, target.long(), weight, ignore_index, reduction, label_smoothing)
        refusal = (
            "targets of uint8 and label_smoothing: PyTorch ignores class 156 in a part of this loss, as its "
            "ignore_index, -100, is 156 in uint8",
            "give targets of int64: target.long()",
        )
        return replace(terms, refusal=refusal) if label_smoothing else terms
    axis = 1 if input.dim() > 1 else 0
    alone = input.dim() == 1
    classes = input.shape[axis]
    if weight is None and not target.is_floating_point():  # label smoothing keeps the sum over classes at one
        counted = target != ignore_index
        number = counted.sum(dtype=accumulation_dtype(input.dtype)) if reduction == "mean" else 1.0
        return Loss(axis, counted, number, softmax_root, one_sample=alone)
    each = torch.ones(classes, dtype=input.dtype, device=input.device) if weight is None else weight
    if target.is_floating_point():
        smooth = target * (1 - label_smoothing) + label_smoothing / classes
        form = [-1 if dim == axis else 1 for dim in range(input.dim())]
        mass = (smooth * each.view(form)).sum(axis)
        divisor: Tensor | float = input.numel() / classes
    else:
        counted = target != ignore_index
        own = each[torch.where(counted, target, 0)] * counted
        mass = (1 - label_smoothing) * own + label_smoothing * each.mean() * counted
        divisor = own.sum(dtype=accumulation_dtype(own.dtype))
    return Loss(axis, mass, divisor if reduction == "mean" else 1.0, softmax_root, one_sample=alone)


@_rule_of(F.mse_loss)
def _mse_loss(input: Tensor, target: Tensor, reduction: str = "mean", weight: Tensor | None = None) -> Loss:
    divisor = _divisor(input, target, reduction, None if weight is None else weight.sum())
    return _one_term_per_entry(input, target, 1.0 if weight is None else weight, divisor, gaussian_root)


@_rule_of(F.binary_cross_entropy_with_logits)
def _binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Loss:
    each: Tensor | float = 1.0 if weight is None else weight
    if pos_weight is not None:
        each = each * (1 + (pos_weight - 1.0) * target)  # zero less one is 255 among bytes
    return _one_term_per_entry(input, target, each, _divisor(input, target, reduction), bernoulli_root)


def _divisor(
    input: Tensor, target: Tensor, reduction: str, total: Tensor | float | None = None
) -> Tensor | float | None:
    """Return the divisor of a loss; for a mean, the ``total``, by default the number of broadcast entries.

    Return ``None`` if a sample may meet the targets of all others: losses of batches then do not add up.
    """
    shape = input.shape if input.shape == target.shape else torch.broadcast_shapes(input.shape, target.shape)
    if shape != input.shape and target.dim() != input.dim():
        return None
    if reduction in ("none", "sum"):
        return 1.0
    return float(shape.numel()) if total is None else total


def _one_term_per_entry(
    input: Tensor,
    target: Tensor,
    weight: Tensor | float,
    divisor: Tensor | float | None,
    root: Callable[[Tensor, Tensor], Root],
) -> Loss:
    """Describe a loss with one term for each entry of its input."""
    if target.shape != input.shape:
        refusal = (
            f"input {list(input.shape)} and target {list(target.shape)} are broadcast against each other",
            "give both the same shape",
        )
        return Loss(None, weight, divisor, root, refusal)
    if isinstance(weight, Tensor):
        weight = weight.expand(input.shape)
    return Loss(None, weight, divisor, root)


@_rule_of(F.nll_loss)
def _nll_loss(**given: Any) -> Loss:
    terms = _cross_entropy(**given)
    refusal = (
        "nll_loss is linear in its log-probabilities, so its own Hessian is zero; and no log_softmax over the "
        "classes has made them",
        "give the logits to cross_entropy, or their log_softmax to nll_loss",
    )
    return replace(terms, refusal=refusal, link=LOG_SOFTMAX)


@_rule_of(F.kl_div)
def _kl_div(input: Tensor, target: Tensor, reduction: str = "mean", log_target: bool = False) -> Loss:
    of_batch = len(input) if input.dim() else 1
    divisor = _divisor(input, target, reduction, of_batch if reduction == "batchmean" else None)
    mass = target.exp() if log_target else target
    terms = _one_term_per_entry(input, target, mass, divisor, softmax_root)
    refusal = (
        "kl_div is linear in its log-probabilities, so its own Hessian is zero; and no log_softmax has made "
        "them",
        "give it the log_softmax of logits, or give the logits to cross_entropy, whose targets may be "
        "probabilities",
    )
    return replace(terms, refusal=terms.refusal or refusal, link=None if terms.refusal else LOG_SOFTMAX)


@_rule_of(F.binary_cross_entropy)
def _binary_cross_entropy(**given: Any) -> Loss:
    terms = _binary_cross_entropy_with_logits(**given)
    refusal = (
        "its curvature in probabilities is not that in logits, so the matrix would depend on what you call the "
        "model's output; and no sigmoid has made them",
        "give logits to binary_cross_entropy_with_logits, or their sigmoid to this loss",
    )
    return replace(terms, refusal=refusal, link=SIGMOID)


@_rule_of(F.poisson_nll_loss)
def _poisson_nll_loss(
    input: Tensor,
    target: Tensor,
    log_input: bool = True,
    eps: float = 1e-8,
    reduction: str = "mean",
    **options: Any,
) -> Loss:
    terms = _one_term_per_entry(input, target, 1.0, _divisor(input, target, reduction), poisson_root)
    if log_input or terms.refusal:
        return terms
    instead = "give logarithms of rates, with log_input=True"
    if eps:
        why = "it adds eps to the rates, so its curvature is negative where they are small: it has no root"
        return replace(terms, refusal=(why, f"{instead}; or give eps=0.0"))
    refusal = (
        "its curvature in rates is not that in their logarithms, so the matrix would depend on what you call "
        "the model's output; and no exponential has made them",
        instead,
    )
    return replace(terms, refusal=refusal, link=EXPONENTIAL)


@_rule_of(F.l1_loss)
def _l1_loss(**given: Any) -> Loss:
    refusal = (
        "the Hessian of l1_loss is zero wherever it exists",
        "use smooth_l1_loss, huber_loss or mse_loss",
    )
    return replace(_mse_loss(**given), root=None, refusal=refusal)


@_rule_of(F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss)
def _generic_entries(
    input: Tensor, target: Tensor, reduction: str = "mean", weight: Tensor | None = None, **options: Any
) -> Loss:
    """Describe a loss with one term for each entry, whose curvature double backward computes."""
    each: Tensor | float = 1.0 if weight is None else weight
    return Loss(None, each, _divisor(input, target, reduction), None)


def _generic(input: Tensor, *args: Any, **kwargs: Any) -> Loss:
    """Describe a loss with an unknown number of terms, whose curvature double backward computes."""
    return Loss(None, 1.0, None, None)


add_rule(_generic, F.hinge_embedding_loss, F.multilabel_margin_loss)
add_rule(_generic, F.gaussian_nll_loss, F.multilabel_soft_margin_loss, F.multi_margin_loss)


def _ctc_loss(log_probs: Tensor, *args: Any, **kwargs: Any) -> Loss:
    """Describe a loss with one term for each sample; the axis of samples comes after that of time."""
    batched = log_probs.dim() == 3
    return Loss(None, 1.0, None, None, sample_axis=1 if batched else None, one_sample=not batched)


add_rule(_ctc_loss, F.ctc_loss, input_name="log_probs")


COMPOSITES = frozenset({getattr(F, "linear_cross_entropy", None)}) - {None}  # new in PyTorch 2.13
"""Functions whose body calls a loss function, such as a head with its loss: a linear function and a loss."""


def has_parts(kwargs: dict[str, Any]) -> bool:
    """Tell whether a call of a composite function calls others: a head with ``options`` is one kernel."""
    return kwargs.get("options") is None


def body_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function without its first check, for a mode or a tensor's class that overrides it.

    A mode that overrides the function sees one call, but not the calls in its body. The code is torch's own,
    with the current names of its module, so the results are the same to the last bit.
    """
    assert isinstance(function, FunctionType)
    nobody = dict.fromkeys(("has_torch_function", "has_torch_function_variadic"), lambda *_: False)
    names = {**function.__globals__, **nobody}
    body = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body
