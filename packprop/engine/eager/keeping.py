"""The kept part of a branch until the backward pass: gradients, exact, rounded or on the CPU, or the inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from packprop.engine.eager.choices import ASKED, Keep
from packprop.errors import PackpropError


def choose_keep(budget: int, leaves: list[Any], targets: list[Tensor], shared: bool) -> Keep:
    """Choose what to keep within a budget: exact gradients first, rounded ones last.

    Args:
        budget: Bytes for keeping on the devices of `targets`.
        leaves: All inputs.
        targets: The inputs and outside tensors whose gradients would be kept.
        shared: Says that there is one value per sample, and a gradient that all samples share.
    """

    def size(tensors: list[Tensor], entry_bytes: int = 16) -> int:
        return sum(tensor.numel() * min(tensor.element_size(), entry_bytes) for tensor in tensors)

    offers: list[tuple[int, Keep]] = [(size(targets), "exact")]
    if any(tensor.device.type != "cpu" for tensor in targets):
        offers.append((size([tensor for tensor in targets if tensor.device.type == "cpu"]), "cpu"))
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    recompute: tuple[int, Keep] = (size(inputs), "recompute")
    offers = [recompute] if shared else [*offers, recompute, (size(targets, 2), torch.bfloat16)]
    for need, keep in offers:
        if need <= budget:
            return keep
    least, keep = min(offers, key=lambda offer: offer[0])
    raise PackpropError(
        ASKED,
        f"memory={budget} bytes",
        f"the least that can be kept is {least} bytes, with keep={keep!r}",
        f"allow {least} bytes; or let fn compute the penalty from a smaller tensor",
    )


def to_keep(gradient: Tensor, keep: Keep) -> Tensor:
    """A gradient in the form that waits for the backward pass; it holds no memory beside its own."""
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
