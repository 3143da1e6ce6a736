"""The keyword arguments of `eager_backward`: errors for wrong ones, and the ways to keep a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypedDict

import torch
from torch import Tensor

from packprop.engine.memory.bytes import byte_count
from packprop.errors import BadInput, PackpropError

Keep = Literal["exact", "cpu", "recompute"] | torch.dtype
Hook = Callable[..., Tensor | Sequence[Tensor] | None]

ASKED = "eager_backward: the value of a function and, at once, its gradient"


class Choices(TypedDict, total=False):
    """The keyword arguments of `eager_backward`."""

    chunks: int | None
    axes: int | Sequence[int | None]
    reduction: Literal["sum", "mean"]
    weights: Tensor | None
    keep: Keep
    memory: int | str | None
    hook: Hook | None
    check: bool


def bad(where: str, why: str, instead: str) -> BadInput:
    """Make the error for an unusable argument of `eager_backward`."""
    return BadInput(ASKED, where, why, instead)


def check_choices(choices: Choices) -> None:
    """Refuse keyword arguments that are wrong for any inputs."""
    chunks, keep, weights = choices["chunks"], choices["keep"], choices["weights"]
    if chunks is not None and (type(chunks) is not int or chunks < 1):
        raise bad(f"{chunks=}", "the number of pieces is a positive integer", "chunks=4, say")
    if choices["reduction"] not in ("sum", "mean"):
        why = "the scalars of pieces are added or averaged"
        raise bad(f"reduction={choices['reduction']!r}", why, "'sum' or 'mean'")
    if keep not in ("exact", "cpu", "recompute") and not (
        isinstance(keep, torch.dtype) and keep.is_floating_point
    ):
        known = "'exact', 'cpu', 'recompute', or a dtype such as torch.bfloat16"
        raise bad(f"{keep=}", "there is no such choice", known)
    if (memory := choices["memory"]) is not None:
        if byte_count(memory) is None:
            raise bad(f"{memory=}", "this is no number of bytes", "memory='64MiB', say")
        if keep != "exact":
            raise bad(f"{keep=}, {memory=}", "both choose what is kept", "give one of them")
    if weights is not None and not (
        isinstance(weights, Tensor) and weights.ndim == 1 and weights.is_floating_point()
    ):
        raise bad("weights", "there is one weight per sample", "a floating point tensor [n]")


def choose_keep(budget: int, leaves: list[Tensor], targets: list[Tensor], shared: bool) -> Keep:
    """Choose what to keep within a budget: exact gradients first, rounded ones last.

    Args:
        budget: Bytes for keeping on the devices of `targets`.
        leaves: All inputs.
        targets: The inputs and outside tensors whose gradients would be kept.
        shared: Says that there is one value per sample, and a gradient that all samples share.

    Raises:
        PackpropError: If nothing fits into the budget.
    """

    def size(tensors: list[Tensor], entry_bytes: int = 16) -> int:
        sizes = [t.element_size() if t.is_complex() else min(t.element_size(), entry_bytes) for t in tensors]
        return sum(tensor.numel() * size for tensor, size in zip(tensors, sizes, strict=True))

    offers: list[tuple[int, Keep]] = [(size(targets), "exact")]
    if any(tensor.device.type != "cpu" for tensor in targets):
        offers.append((size([tensor for tensor in targets if tensor.device.type == "cpu"]), "cpu"))
    recompute: tuple[int, Keep] = (size(leaves), "recompute")
    offers = [recompute] if shared else [*offers, recompute, (size(targets, 2), torch.bfloat16)]
    for need, keep in offers:
        if need <= budget:
            return keep
    least, keep = min(offers, key=lambda offer: offer[0])
    raise PackpropError(
        ASKED,
        f"memory={budget} bytes",
        f"packprop must keep at least {least} bytes, with keep={keep!r}",
        f"allow {least} bytes; or let fn compute the penalty from a smaller tensor",
    )


def to_keep(gradient: Tensor, keep: Keep) -> Tensor:
    """Return a gradient in the form that waits for the backward pass, in memory of its own size."""
    if gradient.layout is not torch.strided:
        return gradient
    if isinstance(keep, torch.dtype) and gradient.is_floating_point():
        gradient = gradient.to(keep)
    elif keep == "cpu" and gradient.device.type != "cpu":
        host = torch.empty_like(gradient, device="cpu", pin_memory=gradient.is_cuda)
        return host.copy_(gradient, non_blocking=True)
    if gradient.untyped_storage().nbytes() > gradient.numel() * gradient.element_size():
        return gradient.clone()
    return gradient
