"""Normalisations: weight and bias scale and shift what the function returns without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packprop.functions.building import SavedTensor, scaled
from packprop.functions.entry import Call, Entry
from packprop.functions.registry import made_later, register_use


def _normalisation(
    call: Call,
    weight: Tensor | None,
    bias: Tensor | None,
    normalise: Callable[[], Tensor],
    *,
    channels: bool,
) -> list[Entry]:
    """Entries of weight and bias; ``channels``: both go along axis 1 of the output, not along the last ones."""
    aligned = None
    parameter = weight if weight is not None else bias
    if channels and parameter is not None:
        aligned = [1, parameter.numel(), *[1] * (len(call.shape) - 2)]
    entries = []
    if weight is not None:
        entries.append(scaled(call, weight, normalise, aligned=aligned, linear=True))
    if bias is not None:
        entries.append(scaled(call, bias, aligned=aligned))
    return entries


@register_use(F.batch_norm)
@made_later((3, "weight"))
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
        return None  # it mixes samples: a backward pass through it is refused
    x, mean, var = (SavedTensor(t, "batch_norm") for t in (input, running_mean, running_var))

    def normalise() -> Tensor:
        return F.batch_norm(x(), mean(), var(), eps=eps)

    return _normalisation(call, weight, bias, normalise, channels=True)


@register_use(F.layer_norm, torch.layer_norm)
@made_later((2, "weight"))
def _layer_norm(
    call: Call,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> list[Entry]:
    x = SavedTensor(input, "layer_norm")
    shape = list(normalized_shape)
    return _normalisation(call, weight, bias, lambda: F.layer_norm(x(), shape, eps=eps), channels=False)


@register_use(F.rms_norm, torch.rms_norm)
@made_later((2, "weight"))
def _rms_norm(
    call: Call,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> list[Entry]:
    x = SavedTensor(input, "rms_norm")
    shape = list(normalized_shape)
    return _normalisation(call, weight, None, lambda: F.rms_norm(x(), shape, eps=eps), channels=False)


@register_use(F.group_norm, torch.group_norm)
@made_later((2, "weight"))
def _group_norm(
    call: Call,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> list[Entry]:
    x = SavedTensor(input, "group_norm")
    return _normalisation(call, weight, bias, lambda: F.group_norm(x(), num_groups, eps=eps), channels=True)


@register_use(F.instance_norm)
@made_later((3, "weight"))
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
    x = SavedTensor(input, "instance_norm")
    buffers = (running_mean, running_var) if not use_input_stats else (None, None)
    statistics = [None if buffer is None else SavedTensor(buffer, "instance_norm") for buffer in buffers]

    def normalise() -> Tensor:
        mean, var = (None if saved is None else saved() for saved in statistics)
        return F.instance_norm(x(), mean, var, use_input_stats=use_input_stats, eps=eps)

    return _normalisation(call, weight, bias, normalise, channels=True)
