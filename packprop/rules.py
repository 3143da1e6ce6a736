"""The rules: one short function for each torch function, or family of them, that takes parameters."""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packprop.algorithms import chosen
from packprop.kernels import grouped_gradients
from packprop.patches import as_tuple, patch_moment, patches, transposed_patches
from packprop.structures import Dense, Later, Lookup, Outer, Structure
from packprop.types import Layout, accumulation_dtype
from packprop.uses import (
    Call,
    Entry,
    Fans,
    Samples,
    Saved,
    Signals,
    affine,
    choose,
    fallback,
    fold_swapped,
    fold_to,
    name_of,
    register_use,
    rowwise,
    scaled,
)

# Affine functions


@register_use(F.linear)
def _linear(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Entry] | None:
    if call.consumes(input):
        return None
    found = [affine(call, input, weight)]
    return found if bias is None else [*found, scaled(call, bias)]


@register_use(torch.matmul, torch.mm, torch.bmm, torch.mv, Tensor.matmul, Tensor.mm, Tensor.bmm)
@register_use(Tensor.mv, Tensor.__matmul__)
def _matmul(
    call: Call,
    input: Tensor,
    other: Tensor | None = None,
    *,
    mat2: Tensor | None = None,
    vec: Tensor | None = None,
) -> list[Entry] | None:
    other = next(t for t in (other, mat2, vec) if t is not None)
    if call.consumes(other) and not call.consumes(input):
        if other.dim() == 2:
            return [affine(call, input, other, transposed=True)]
        if other.dim() == input.dim() and other.shape[:-2] == input.shape[:-2] and other.dim() > 2:
            batch = string.ascii_lowercase[: other.dim() - 2]
            return contraction(call, other, batch + "yz", input, batch + "xy", batch + "xz")
    if call.consumes(input) and not call.consumes(other) and input.dim() == 2 and other.dim() >= 2:
        batch = string.ascii_lowercase[: other.dim() - 2]
        return contraction(call, input, "xy", other, batch + "yz", batch + "xz")
    return None


@register_use(torch.addmm, Tensor.addmm)
def _addmm(
    call: Call, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> list[Entry] | None:
    if call.consumes(mat1) or alpha != 1:
        return None
    found = [scaled(call, input, float(beta))] if call.consumes(input) else []
    return [*found, affine(call, mat1, mat2, transposed=True)]


@register_use(torch.einsum)
def _einsum(call: Call, equation: Any, *operands: Any) -> list[Entry] | None:
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "." in equation or len(operands) != 2:
        return None
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        right = "".join(sorted(letter for letter in set(left) - {","} if left.count(letter) == 1))
    position = 0 if call.consumes(operands[0]) else 1
    if call.consumes(operands[1 - position]):
        return None
    weight, x = terms[position], terms[1 - position]
    return contraction(call, operands[position], weight, operands[1 - position], x, right)


def contraction(
    call: Call, weight: Tensor, w: str, x: Tensor, x_letters: str, y_letters: str
) -> list[Entry] | None:
    """``einsum("w,x->y")`` in one parameter: its gradient is the contraction of signal and inputs."""
    repeated = any(len(set(term)) < len(term) for term in (w, x_letters, y_letters))
    if repeated or set(w) - set(x_letters + y_letters) or (set(x_letters) - set(w + y_letters)):
        return None
    # the equation's letters become small ones: N and V are the sample and the column
    names = dict(zip(sorted(set(w + x_letters + y_letters)), string.ascii_lowercase, strict=False))
    w, x_letters, y_letters = ("".join(names[letter] for letter in term) for term in (w, x_letters, y_letters))
    saved = Saved(x, name_of(call.function))

    def meet(signals: Signals, where: Sequence[Layout], samples: Samples) -> Structure:
        layout, signal = where[0], signals[0]
        if signal is None:
            return Dense(None)
        shared = "" if layout.axis is None else y_letters[layout.axis]
        if shared in w and shared:  # each sample has entries of the parameter to itself
            return fallback(call, weight).meet(signals, where, samples)
        inside = layout if not shared else layout._replace(axis=x_letters.index(shared))
        inputs = choose(inside.to_front(saved()), samples)
        moved = choose(layout.to_front(signal, 1), samples, 1)
        x_term, y_term = x_letters, y_letters
        if shared and layout.parts == 1:
            x_term, y_term = x_term.replace(shared, ""), y_term.replace(shared, "")
        return Dense(torch.einsum(f"VN{y_term},N{x_term}->VN{w}", moved, inputs))

    def admits(axis: int) -> bool:
        return y_letters[axis] in x_letters

    return [Entry(weight, "Dense", meet, weight.numel(), admits=admits, linear=True)]


@register_use(F.bilinear)
def _bilinear(
    call: Call, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> list[Entry] | None:
    if call.consumes(input1) or call.consumes(input2):
        return None
    fan_out, *fan_in = weight.shape
    fold = fold_to(weight.shape)

    def build(signal: Tensor | None, left: Tensor, right: Tensor) -> Structure:
        if signal is not None:
            signal = signal.reshape(*signal.shape[:2], -1, 1, fan_out)
        products = left.reshape(left.shape[0], -1, 1, fan_in[0], 1) * right.reshape(
            right.shape[0], -1, 1, 1, fan_in[1]
        )
        return Outer(products.flatten(-2), signal, fold)

    meet = rowwise(build, "bilinear", input1, input2)
    last = len(call.shape) - 1
    found = [Entry(weight, "Outer", meet, 2 * weight.numel(), admits=lambda axis: axis != last, linear=True)]
    return found if bias is None else [*found, scaled(call, bias)]


MANY_CHANNELS = 16
"""From which on moments of patches are had by shifts of the input: with fewer, calls are what takes time."""


def _convolution(
    call: Call,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    fold: Callable[[torch.Size], Callable[[Tensor], Tensor]],
    unfold: Callable[[Tensor], Tensor],
    gradients: Callable[[Tensor, Tensor], Tensor],
    moment: Callable[[Tensor], Tensor] | None = None,
) -> list[Entry] | None:
    """Entries of a convolution, given how its input unfolds to ``[b, s, g, i]``, and products of that.

    ``gradients`` makes those of single samples ``[1, n, *p]`` from images and signals, without unfolding.
    """
    if call.consumes(x):
        return None
    space = weight.dim() - 2
    channels = call.shape[-space - 1]
    positions = call.shape[-space:].numel()
    rearrange = fold(weight.shape)

    fan_in = weight.numel() // channels
    fans = Fans(groups, fan_in, channels // groups, unfolds=True)
    many = x.shape[-space - 1] // groups >= MANY_CHANNELS

    def build(signal: Tensor | None, x: Tensor) -> Structure:
        images = x.reshape(-1, *x.shape[-space - 1 :])
        shape = (x.shape[0], len(images) // len(x) * positions, groups, fan_in)
        direct = None
        if signal is not None:
            if len(signal) == 1 and len(images) == len(x) and images.dtype == signal.dtype:
                arrived = signal.reshape(len(x), *signal.shape[-space - 1 :])
                direct = functools.partial(gradients, images, arrived)
            signal = signal.flatten(-space).transpose(-1, -2)
            signal = signal.reshape(*signal.shape[:2], shape[1], groups, channels // groups)
        rows = Later(shape, lambda: unfold(images).reshape(shape))
        by_shifts = chosen("factors", "shifts" if many else "patches", {}, None) == "shifts"
        made = functools.partial(moment, images) if moment is not None and by_shifts else None
        return Outer(rows, signal, rearrange, made, direct=direct)

    scratch = weight.numel() + positions * (groups * fan_in + channels)
    single = weight.numel() + positions * channels + x.shape[-space - 1 :].numel()
    alone = groups * positions * fan_in if moment is None or not many else 3 * x.shape[-space - 1 :].numel()
    meet = rowwise(build, name_of(call.function), x)
    found = [
        Entry(
            weight,
            "Outer",
            meet,
            scratch,
            single=single,
            admits=lambda axis: axis == 0,
            alone=alone,
            fans=fans,
            linear=True,
        )
    ]
    if bias is None:
        return found
    form = (*(1,) * (len(call.shape) - space - 1), channels, *(1,) * space)
    return [*found, scaled(call, bias, aligned=form)]


@register_use(F.conv1d, F.conv2d, F.conv3d)
def _conv(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> list[Entry] | None:
    kernel = tuple(weight.shape[2:])
    dims = len(kernel)
    steps, gaps = as_tuple(stride, dims), as_tuple(dilation, dims)
    if padding == "same":
        total = [gap * (k - 1) for gap, k in zip(gaps, kernel, strict=True)]
        sides = [(width // 2, width - width // 2) for width in total]
    else:
        sides = [(p, p) for p in as_tuple(0 if padding == "valid" else padding, dims)]
    widths = [width for pair in reversed(sides) for width in pair]

    def unfold(x: Tensor) -> Tensor:
        return patches(F.pad(x, widths) if any(widths) else x, kernel, steps, gaps, groups)

    def moment(x: Tensor) -> Tensor:
        return patch_moment(x, kernel, gaps, sides, groups)

    def gradients(x: Tensor, signal: Tensor) -> Tensor:
        even = all(before == after for before, after in sides)
        insets = [before if even else 0 for before, _ in sides]
        x = x if even else F.pad(x, widths)
        return grouped_gradients(x, signal, weight.shape, steps, insets, gaps, groups)

    fewer = math.prod(kernel) > 1 and set(steps) == {1}
    return _convolution(
        call, input, weight, bias, groups, fold_to, unfold, gradients, moment if fewer else None
    )


@register_use(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def _conv_transpose(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> list[Entry] | None:
    kernel = tuple(weight.shape[2:])
    steps, inset, outset, gaps = (
        as_tuple(option, len(kernel)) for option in (stride, padding, output_padding, dilation)
    )

    def unfold(x: Tensor) -> Tensor:
        return transposed_patches(x, kernel, steps, inset, outset, gaps, groups)

    def gradients(x: Tensor, signal: Tensor) -> Tensor:  # a convolution takes the signals back to the inputs
        beyond = [out // step for out, step in zip(outset, steps, strict=True)]
        if any(beyond):  # where the outputs are longer than the inputs account for, it has outputs of its own
            x = F.pad(x, [width for extra in reversed(beyond) for width in (0, extra)])
        return grouped_gradients(signal, x, weight.shape, steps, inset, gaps, groups)

    return _convolution(call, input, weight, bias, groups, fold_swapped, unfold, gradients)


@register_use(F.embedding)
def _embedding(
    call: Call,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> list[Entry]:
    table, width = weight.shape

    def build(signal: Tensor | None, index: Tensor) -> Structure:
        index = index.reshape(index.shape[0], -1)
        if signal is not None:
            signal = signal.reshape(*signal.shape[:2], -1, width)
            if padding_idx is not None:
                signal = signal * (index != padding_idx % table)[None, :, :, None]
        return Lookup(index, signal, table, accumulation_dtype(weight.dtype))

    refusal = _refusal(max_norm, scale_grad_by_freq)
    meet = rowwise(build, "embedding", input)
    last = len(call.shape) - 1
    return [Entry(weight, "Lookup", meet, weight.numel(), refusal, lambda axis: axis != last, linear=True)]


@register_use(F.embedding_bag)
def _embedding_bag(
    call: Call,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    *_: Any,
    **__: Any,
) -> list[Entry]:
    refusal = _refusal(max_norm, scale_grad_by_freq)
    return [replace(fallback(call, parameter), refusal=refusal, linear=True) for parameter in call.parameters]


def _refusal(max_norm: float | None, scale_grad_by_freq: bool) -> tuple[str, str] | None:
    """Options of tables that leave no gradient to single samples: why, and what instead."""
    if max_norm is not None:
        return (
            "max_norm rescales rows of the table in place during the forward pass, so that the parameter "
            "that was used is no longer there",
            "rescale the table yourself after the optimizer's step, and drop max_norm",
        )
    if scale_grad_by_freq:
        return (
            "scale_grad_by_freq divides by counts over the whole batch: rows of single samples depend on "
            "the others",
            "drop scale_grad_by_freq",
        )
    return None


# Entry by entry


def _family(*names: str) -> list[Callable[..., Any]]:
    """Function, method, in-place method and operators of elementwise functions."""
    spellings = [spelling for name in names for spelling in (name, f"{name}_", f"__{name}__")]
    spellings += [f"__{prefix}{name}__" for name in names for prefix in "ri"]
    owners = (torch, Tensor)
    found = [getattr(owner, spelling, None) for owner in owners for spelling in spellings]
    return [function for function in found if function is not None]


def _operand(call: Call, input: Any, other: Any) -> tuple[Tensor, Any, bool] | None:
    """Parameter, the other operand, and whether the parameter came first."""
    if call.consumes(input) and call.consumes(other):
        return None
    return (input, other, True) if call.consumes(input) else (other, input, False)


@register_use(*_family("add"))
def _add(call: Call, input: Any, other: Any, *, alpha: float = 1) -> list[Entry] | None:
    if (pair := _operand(call, input, other)) is None:
        return None
    return [scaled(call, pair[0], 1.0 if pair[2] else float(alpha))]


@register_use(*_family("sub", "subtract"))
def _sub(call: Call, input: Any, other: Any, *, alpha: float = 1) -> list[Entry] | None:
    if (pair := _operand(call, input, other)) is None or call.function is Tensor.__rsub__:
        return None
    return [scaled(call, pair[0], 1.0 if pair[2] else -float(alpha))]


@register_use(*_family("mul", "multiply"))
def _mul(call: Call, input: Any, other: Any) -> list[Entry] | None:
    if (pair := _operand(call, input, other)) is None:
        return None
    return [scaled(call, pair[0], Saved(pair[1], "mul"))]


@register_use(torch.cat, torch.concat, torch.concatenate)
def _cat(call: Call, tensors: Sequence[Tensor], dim: int = 0, **_: Any) -> list[Entry] | None:
    axis = dim % len(call.shape)
    found, offset = [], 0
    for tensor in tensors:
        if call.consumes(tensor):
            if sum(tensor is other for other in tensors) > 1:
                return None
            form = [*tensor.shape]
            source = call.unexpanded(tensor)
            if source is not tensor:
                form = [1] * (tensor.dim() - source.dim()) + [*source.shape]
                if form[axis] != tensor.shape[axis]:
                    return None
            found.append(scaled(call, tensor, aligned=form, window=(axis, offset)))
        offset += tensor.shape[axis]
    return found


@register_use(F.prelu, torch.prelu, Tensor.prelu)
def _prelu(call: Call, input: Tensor, weight: Tensor) -> list[Entry] | None:
    if call.consumes(input) or (weight.numel() > 1 and input.dim() < 2):
        return None
    form = [1] * len(call.shape)
    if weight.numel() > 1:
        form[1] = weight.numel()
    saved = Saved(input, "prelu")
    return [scaled(call, weight, lambda: saved().clamp(max=0), aligned=form, linear=True)]


# Normalisation: an affine map of what the function returns without it


def _normalised(
    call: Call,
    weight: Tensor | None,
    bias: Tensor | None,
    normalise: Callable[[], Tensor],
    channels: bool,
) -> list[Entry]:
    form = None
    parameter = weight if weight is not None else bias
    if channels and parameter is not None:
        form = [1, parameter.numel(), *[1] * (len(call.shape) - 2)]
    found = [] if weight is None else [scaled(call, weight, normalise, aligned=form, linear=True)]
    return found if bias is None else [*found, scaled(call, bias, aligned=form)]


@register_use(F.batch_norm)
def _batch_norm(
    call: Call,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> list[Entry] | None:
    if training or running_mean is None or running_var is None:
        return None  # refused when the pass is walked: it mixes samples
    x, mean, var = (Saved(t, "batch_norm") for t in (input, running_mean, running_var))

    def normalise() -> Tensor:
        return F.batch_norm(x(), mean(), var(), eps=eps)

    return _normalised(call, weight, bias, normalise, channels=True)


@register_use(F.layer_norm, torch.layer_norm)
def _layer_norm(
    call: Call,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> list[Entry]:
    x = Saved(input, "layer_norm")
    shape = list(normalized_shape)
    return _normalised(call, weight, bias, lambda: F.layer_norm(x(), shape, eps=eps), False)


@register_use(F.rms_norm, torch.rms_norm)
def _rms_norm(
    call: Call,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> list[Entry]:
    x = Saved(input, "rms_norm")
    shape = list(normalized_shape)
    return _normalised(call, weight, None, lambda: F.rms_norm(x(), shape, eps=eps), False)


@register_use(F.group_norm, torch.group_norm)
def _group_norm(
    call: Call,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> list[Entry]:
    x = Saved(input, "group_norm")
    return _normalised(call, weight, bias, lambda: F.group_norm(x(), num_groups, eps=eps), True)


@register_use(F.instance_norm)
def _instance_norm(
    call: Call,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> list[Entry]:
    x = Saved(input, "instance_norm")
    given = (running_mean, running_var) if not use_input_stats else (None, None)
    means = [None if t is None else Saved(t, "instance_norm") for t in given]

    def normalise() -> Tensor:
        mean, var = (None if t is None else t() for t in means)
        return F.instance_norm(x(), mean, var, use_input_stats=use_input_stats, eps=eps)

    return _normalised(call, weight, bias, normalise, channels=True)


# Functions that mix samples, and functions that only expand a parameter


def _batch_norm_mixes(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    *_: Any,
    **__: Any,
) -> bool:
    return bool(training)


MIXERS: dict[Callable[..., Any], Callable[..., bool]] = {F.batch_norm: _batch_norm_mixes}
EXPANSIONS = frozenset({Tensor.expand, Tensor.expand_as, torch.broadcast_to, Tensor.broadcast_to})
REORDERINGS = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in (
        *("__getitem__", "index_select", "gather", "take_along_dim", "take", "masked_select"),
        *("index_add", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce"),
        *("sort", "topk", "argsort", "msort", "repeat_interleave", "unique", "nonzero"),
    )
    if hasattr(owner, name)
)
"""Functions by which data can decide on the order of rows."""
