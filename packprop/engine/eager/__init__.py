"""Penalties that cost no memory: `eager_backward` takes the gradient of a branch at once.

A branch of the autograd graph whose value goes straight into the loss need not wait for the backward
pass. Its gradient is known as soon as its value is, up to a factor that arrives later, and packprop
can free everything else that it computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Literal, ParamSpec, Unpack, overload

import torch
from torch import Tensor

from packprop.engine.eager.choices import Choices, Hook, Keep, bad, check_choices
from packprop.engine.eager.node import attach
from packprop.engine.eager.pieces import prepare

__all__ = ["Choices", "eager_backward"]

P = ParamSpec("P")


@overload
def eager_backward(
    fn: Callable[..., Tensor], first: Any, /, *inputs: Any, **choices: Unpack[Choices]
) -> Tensor: ...
@overload
def eager_backward(fn: Callable[P, Tensor], /, **choices: Unpack[Choices]) -> Callable[P, Tensor]: ...
@overload
def eager_backward(
    **choices: Unpack[Choices],
) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]: ...
def eager_backward(
    fn: Callable[..., Tensor] | None = None,
    /,
    *inputs: Any,
    chunks: int | None = None,
    axes: int | Sequence[int | None] = 0,
    reduction: Literal["sum", "mean"] = "sum",
    weights: Tensor | None = None,
    keep: Keep = "exact",
    memory: int | str | None = None,
    hook: Hook | None = None,
    check: bool = False,
) -> Any:
    """Evaluate `fn(*inputs)`, take its gradient at once, free its graph, return the value.

    The value backpropagates like any tensor: its gradient multiplies the kept gradients. Tensors that
    `fn` reaches by closure and that require a gradient get theirs as well, without being declared.

    Args:
        fn: Returns a scalar, or one value per sample `[n]`: the gradient of a sample's value then scales
            its rows of the inputs' gradients. It must not change its inputs.
        *inputs: Tensors, or tuples, lists, dicts and dataclasses of them; anything else is passed
            on. Without inputs the result is a function: `@eager_backward(chunks=4)`.
        chunks: The number of pieces of the inputs to evaluate one after the other. Scalars add up; values
            per sample join if `axes` is 0, and add up otherwise.
        axes: The axis along which inputs are split: one number for all, or one entry per input,
            where None marks an input that has no such axis and is passed whole. Parameters and
            scalars are never split. Samples lie on axis 0.
        reduction: `"mean"` if `fn` averages over the split axis: a piece then counts by its length. For a
            mean with another divisor (cross entropy with ignored targets), let `fn` sum, and divide the
            value.
        weights: `[n]`, for a `fn` that returns one value per sample: the value is the scalar
            `(weights * fn(*inputs)).sum()`, which is also right for parameters.
        keep: Kept for the backward pass: the gradients, exact (`"exact"`), rounded to a dtype, or on the
            `"cpu"` (pinned, asynchronous); or the inputs, to `"recompute"`.
        memory: The most bytes (`"64MiB"`) to keep on the inputs' device, in place of `keep`: packprop takes
            the first of exact, cpu (from an accelerator), recompute and `torch.bfloat16` that fits.
        hook: A function to call in the backward pass with the scaled gradients of the inputs that have
            one, in order; it returns the gradients to pass on (one tensor, or as many as it got), or
            None to change nothing.
        check: Check that samples do not mix and that pieces add up; costs time and memory.

    Returns:
        A scalar or `[n]`, of the dtype that `fn` returned, or of its product with `weights`.

    Raises:
        BadInput: An argument is wrong, an input was freed, or `fn` returns a tensor of another shape, not
            of floating point or detached, changes an input, or (`check`) mixes samples, or pieces of it
            do not add up.
        PackpropError: One value per sample cannot scale the gradient of a shared tensor, no name leads
            to an outer tensor that `fn` uses, or `memory` is too small. In the backward pass: the
            gradient was released already, an input to recompute from was changed or freed,
            `create_graph=True` without `keep="recompute"`.

    Example:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> value = eager_backward(lambda x: (x**3).sum(), x)
        >>> (10 * value).backward()
        >>> x.grad
        tensor([ 30., 120.])
    """
    choices = Choices(
        chunks=chunks,
        axes=axes,
        reduction=reduction,
        weights=weights,
        keep=keep,
        memory=memory,
        hook=hook,
        check=check,
    )
    check_choices(choices)
    if fn is None:
        return partial(_decorate, choices=choices)
    if not callable(fn):
        raise bad("fn", f"a {type(fn).__name__} cannot be called", "pass a function")
    return _call(fn, inputs, {}, choices) if inputs else _decorate(fn, choices)


def _decorate(fn: Callable[..., Tensor], choices: Choices) -> Callable[..., Tensor]:
    @wraps(fn)
    def eager(*inputs: Any, **named: Any) -> Tensor:
        return _call(fn, inputs, named, choices)

    return eager


def _call(
    fn: Callable[..., Tensor], inputs: tuple[Any, ...], named: dict[str, Any], choices: Choices
) -> Tensor:
    job, leaves = prepare(fn, inputs, named, choices)
    if torch.is_grad_enabled():
        return attach(job, leaves)
    return job.join([job.evaluate(piece, length) for _, length, piece in job.split(leaves)])
