"""Loss -> square root of its Hessian, Monte Carlo draws, number of terms. The one file that names losses.

Everything is said in the canonical form of a loss's input, ``[n, t, c]``: samples, positions whose terms are
independent given the input, and the entries of one position (classes, or 1). A loss over N samples with T
positions of C entries has ``T * C`` columns: one for each position and entry, fed in for all samples at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packprop.errors import PackpropError
from packprop.memory import found_fault
from packprop.types import Layout, accumulation_dtype


@dataclass(frozen=True)
class Root:
    """Square root of the Hessian of the terms of a loss.

    Args:
        columns: Columns of one position.
        position: ``(t, start, stop) -> [k, n, c]``, some columns at position ``t``.
        draw: ``(draws, generator) -> [m, n, t, c]``, gradients of the loss for drawn targets: the mean of
            their outer products over draws is the Hessian. Not yet divided by ``sqrt(draws)``.
        entrywise: A root with one column for each entry, where this one has fewer.
    """

    columns: int
    position: Callable[[int, int, int], Tensor]
    draw: Callable[[int, torch.Generator | None], Tensor]
    entrywise: Root | None = None


@dataclass(frozen=True)
class Loss:
    """What a loss rule says about one call.

    Args:
        class_axis: Axis of the input whose entries interact; ``None`` if every entry has its own term.
        weight: What multiplies each term before reduction, of the input's shape without ``class_axis``;
            a number if it is the same for all.
        divisor: What the sum of terms is divided by: 1 for ``sum`` and ``none``, ``None`` if unknown.
        root: From canonical input ``[n, t, c]`` and scale of each term ``[n, t]`` to the root;
            ``None`` if the loss is described by its own derivatives alone.
        refusal: Why the loss has no useful curvature, and what to use instead.
    """

    class_axis: int | None
    weight: Tensor | float
    divisor: Tensor | float | None
    root: Callable[[Tensor, Tensor], Root] | None
    refusal: tuple[str, str] | None = None


Rule = Callable[..., Loss]
LOSSES: dict[Callable[..., Any], Rule] = {}


def register_loss(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Say how a loss function curves.

    The decorated rule has the signature of the loss function and returns a ``Loss``. With ``root=None`` the
    Hessian of each sample is found by double backward and decomposed: right for any twice differentiable
    convex loss, slow for many outputs.
    """

    def register(rule: Rule) -> Rule:
        LOSSES.update(dict.fromkeys(functions, rule))
        return rule

    return register


def canonical(tensor: Tensor, layout: Layout, class_axis: int | None, skip: int = 0) -> Tensor:
    """``[*skipped, *f] -> [*skipped, n, t, c]``."""
    inner, _ = without_classes(layout, tensor.shape[skip:], class_axis)
    classes = 1
    if class_axis is not None:
        classes = tensor.shape[class_axis + skip]
        tensor = tensor.movedim(class_axis + skip, -1)
    front = inner.to_front(tensor, skip)
    return front.reshape(*front.shape[: skip + 1], -1, classes)


def from_canonical(tensor: Tensor, shape: torch.Size, layout: Layout, class_axis: int | None) -> Tensor:
    """The inverse of ``canonical`` for columns ``[v, n, t, c] -> [v, *f]``."""
    inner, rest = without_classes(layout, shape, class_axis)
    classes = () if class_axis is None else (shape[class_axis],)
    front = tensor.reshape(tensor.shape[0], *inner.front_shape(rest), *classes)
    back = inner.from_front(front, 1)
    return back if class_axis is None else back.movedim(-1, class_axis + 1)


def without_classes(layout: Layout, shape: torch.Size, class_axis: int | None) -> tuple[Layout, torch.Size]:
    """Where the samples are, and what the shape is, in a tensor without the axis of classes."""
    if class_axis is None:
        return layout, shape
    if layout.axis is not None and layout.axis > class_axis:
        layout = layout._replace(axis=layout.axis - 1)
    return layout, torch.Size([*shape[:class_axis], *shape[class_axis + 1 :]])


def input_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument that the model's output went into: the first, or the one named ``input``."""
    return args[0] if args else kwargs.get("input")


def describe(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Loss:
    """What is known of one call of a loss; a generic description for functions that have no rule."""
    rule = LOSSES.get(function)
    if rule is None:
        return Loss(None, 1.0, None, None)
    return rule(*args, **kwargs)


# Roots


def softmax_root(logits: Tensor, scale: Tensor) -> Root:
    """Of ``scale * (diag(p) - p p^T)``, which has rank ``c - 1``.

    Draws are ``sqrt(scale) (p - e_y)``, entrywise columns ``sqrt(scale p_k) (e_k - p)``. These depend on each
    other, by ``sqrt(p)``, which a reflection takes to the last class z (Householder 1958): left are the columns
    ``sqrt(scale p_k) (e_k - (p + sqrt(p_z) e_z) / (1 + sqrt(p_z)))`` of the other classes.
    """
    log_p = logits.log_softmax(-1)
    strength = scale.sqrt()
    classes = logits.shape[-1]

    def entrywise(t: int, start: int, stop: int) -> Tensor:
        known = log_p[:, t]
        unit = torch.eye(classes, dtype=known.dtype, device=known.device)[start:stop]
        root = (0.5 * known[:, start:stop]).exp()  # stays differentiable where p underflows
        return (unit[:, None] - known.exp()) * root.T[..., None] * strength[:, t, None]

    def draw(draws: int, generator: torch.Generator | None) -> Tensor:
        p = log_p.exp()
        flat = p.detach().reshape(-1, classes)
        known = flat.isfinite().all(-1, keepdim=True)  # where it is not, the column is NaN for any target
        flat = torch.where(known, flat, 1.0 / classes)
        targets = torch.multinomial(flat, draws, replacement=True, generator=generator)
        index = targets.T.reshape(draws, *p.shape[:-1], 1)
        one_hot = p.new_zeros(draws, *p.shape).scatter_(-1, index, 1.0)
        return (p - one_hot) * strength[..., None]

    def position(t: int, start: int, stop: int) -> Tensor:
        known = log_p[:, t].to(accumulation_dtype(log_p.dtype))
        p, root = known.exp(), (0.5 * known).exp()
        own, last = root[:, start:stop] * strength[:, t, None], root[:, -1:]
        rest, divisor = (1 - p)[:, start:stop], 1 + last
        large = p > 0.5  # of one class at most, for which 1 - p would cancel
        others = torch.where(large, 0.0, p).sum(-1, keepdim=True)
        rest = torch.where(large[:, start:stop], others, rest)
        taken = torch.cat([p[:, :-1] / divisor, last], -1).neg()
        columns = own.T.contiguous()[..., None] * taken
        columns.diagonal(start, 0, 2).copy_(own * (rest + last) / divisor)
        return columns.to(log_p.dtype)

    every = Root(classes, entrywise, draw)
    return every if classes == 1 else Root(classes - 1, position, draw, every)


def gaussian_root(outputs: Tensor, scale: Tensor) -> Root:
    """Of ``2 * scale`` for each entry; draws from ``Normal(f, sqrt(1/2))``."""
    strength = (2 * scale).sqrt()

    def draw(draws: int, generator: torch.Generator | None) -> Tensor:
        noise = torch.randn(
            draws, *outputs.shape, dtype=outputs.dtype, device=outputs.device, generator=generator
        )
        return noise * strength[..., None]

    return Root(1, _entrywise(strength), draw)


def bernoulli_root(logits: Tensor, scale: Tensor) -> Root:
    """Of ``scale * q (1 - q)`` for each entry, ``q`` the sigmoid; draws ``sqrt(scale) (q - y)``."""
    q = logits.sigmoid()
    strength = scale.sqrt()
    deviation = (0.5 * (F.logsigmoid(logits) + F.logsigmoid(-logits))).exp()

    def draw(draws: int, generator: torch.Generator | None) -> Tensor:
        uniform = torch.rand(draws, *q.shape, dtype=q.dtype, device=q.device, generator=generator)
        return (q - (uniform < q.detach()).to(q.dtype)) * strength[..., None]

    return Root(1, _entrywise(deviation.squeeze(-1) * strength), draw)


def matrix_root(hessian: Tensor) -> Root:
    """Of any positive semi-definite Hessian ``[n, c, c]``; draws are columns with random signs."""
    values, vectors = torch.linalg.eigh(hessian)
    largest = values.abs().amax().clamp(min=torch.finfo(values.dtype).tiny)
    tolerance = largest * hessian.shape[-1] * torch.finfo(values.dtype).eps * 10
    if found_fault((values < -tolerance).any()):
        raise PackpropError(
            "A generalized Gauss-Newton quantity was asked for.",
            "the loss function",
            f"its Hessian with respect to the model's output is not positive semi-definite (an eigenvalue "
            f"is {values.min().item():.3g})",
            "use a loss that is convex in the model's output, or ask for Hessian quantities",
        )
    columns = (vectors * values.where(values > tolerance, 0).sqrt().unsqueeze(-2)).movedim(-1, 0)  # [k, n, c]

    def draw(draws: int, generator: torch.Generator | None) -> Tensor:
        shape = (draws, hessian.shape[0], columns.shape[0])
        coin = torch.rand(shape, dtype=columns.dtype, device=columns.device, generator=generator)
        signs = torch.where(coin < 0.5, -1.0, 1.0).to(columns.dtype)
        return torch.einsum("mnk,knc->mnc", signs, columns).unsqueeze(2)

    return Root(columns.shape[0], lambda t, start, stop: columns[start:stop], draw)


def _entrywise(strength: Tensor) -> Callable[[int, int, int], Tensor]:
    """Every entry is its own position with one column."""
    return lambda t, start, stop: strength[None, :, t, None]


# Rules


def _reduction(reduction: str, size_average: bool | None, reduce: bool | None) -> str:
    """The reduction that torch's deprecated flags stand for."""
    if size_average is None and reduce is None:
        return reduction
    return "none" if reduce is False else "sum" if size_average is False else "mean"


@register_loss(F.cross_entropy)
def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Loss:
    axis = 1 if input.dim() > 1 else 0
    classes = input.shape[axis]
    mean = _reduction(reduction, size_average, reduce) == "mean"
    if weight is None and not target.is_floating_point():  # the smoothed classes have a mass of one together
        counted = target != ignore_index
        return Loss(axis, counted, torch.count_nonzero(counted) if mean else 1.0, softmax_root)
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
    return Loss(axis, mass, divisor if mean else 1.0, softmax_root)


@register_loss(F.mse_loss)
def _mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Loss:
    mean = _reduction(reduction, size_average, reduce) == "mean"
    total: Tensor | float = input.numel() if weight is None else weight.sum()
    return _entries(input, target, 1.0 if weight is None else weight, total if mean else 1.0, gaussian_root)


@register_loss(F.binary_cross_entropy_with_logits)
def _binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Loss:
    mean = _reduction(reduction, size_average, reduce) == "mean"
    each: Tensor | float = 1.0 if weight is None else weight
    if pos_weight is not None:
        each = each * (1 + (pos_weight - 1) * target)
    return _entries(input, target, each, input.numel() if mean else 1.0, bernoulli_root)


def _entries(
    input: Tensor,
    target: Tensor,
    weight: Tensor | float,
    divisor: Tensor | float,
    root: Callable[[Tensor, Tensor], Root],
) -> Loss:
    """A loss with one term for each entry of its input."""
    if target.shape != input.shape:
        refusal = (
            f"input {list(input.shape)} and target {list(target.shape)} are broadcast against each other",
            "give both the same shape",
        )
        return Loss(None, weight, divisor, root, refusal)
    if isinstance(weight, Tensor):
        weight = weight.expand(input.shape)
    return Loss(None, weight, divisor, root)


@register_loss(F.nll_loss)
def _nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Loss:
    terms = _cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction)
    refusal = (
        "nll_loss is linear in the log-probabilities that it takes, so that its own Hessian is zero",
        "give the logits to cross_entropy",
    )
    return Loss(None, 1.0, terms.divisor, None, refusal)


@register_loss(F.l1_loss)
def _l1_loss(input: Tensor, *args: Any, **kwargs: Any) -> Loss:
    refusal = (
        "the Hessian of l1_loss is zero wherever it exists",
        "use smooth_l1_loss, huber_loss or mse_loss",
    )
    return replace(_generic_entries(input, *args, **kwargs), refusal=refusal)


@register_loss(F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.poisson_nll_loss)
@register_loss(F.soft_margin_loss, F.kl_div)
def _generic_entries(input: Tensor, *args: Any, **kwargs: Any) -> Loss:
    """One term for each entry; curvature by its own derivatives."""
    reduction = kwargs.get("reduction", "mean")
    divisor = {"mean": float(input.numel()), "sum": 1.0, "none": 1.0}.get(reduction)
    legacy = len(args) > 1 or any(kwargs.get(flag) is not None for flag in ("size_average", "reduce"))
    return Loss(None, 1.0, None if legacy else divisor, None)


@register_loss(F.gaussian_nll_loss, F.multilabel_soft_margin_loss, F.multi_margin_loss)
@register_loss(F.hinge_embedding_loss, F.multilabel_margin_loss)
def _generic(input: Tensor, *args: Any, **kwargs: Any) -> Loss:
    return Loss(None, 1.0, None, None)


def number_of_samples(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Extent of the leading axis of a loss's input: samples, or samples times positions."""
    tensor = input_of(function, args, kwargs)
    if not isinstance(tensor, Tensor) or tensor.dim() == 0:
        return 1
    return 1 if function is F.cross_entropy and tensor.dim() == 1 else tensor.shape[0]
