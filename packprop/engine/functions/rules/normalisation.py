"""Normalisations, in which weight and bias scale and shift the normalised input."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from packprop.engine.functions.building import scaled
from packprop.engine.functions.entry import Entry
from packprop.engine.functions.node_calls import NodeCall
from packprop.engine.functions.nodes import NORMALISATIONS
from packprop.engine.functions.registry import rule_of

Normalised = Callable[[], Tensor] | None
"""Returns the normalised input, without weight and bias; ``None`` if it is not known."""


@rule_of("NativeLayerNorm")
def _layer_norm(call: NodeCall) -> Entry | None:
    x, mean, deviation = call.saved("input"), call.saved("result1"), call.saved("result2")
    axes = tuple(range(-len(call.operand.shape), 0))
    return _scale_or_shift(call, lambda: _standardised(x(), mean(), deviation(), axes))


def _standardised(x: Tensor, mean: Tensor, deviation: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Subtract the mean over some axes, and multiply by the reciprocal of the deviation."""
    if not torch.is_grad_enabled():
        return (x - mean) * deviation
    # PyTorch has no derivatives of its saved statistics, so compute them again
    centred = x - x.mean(axes, keepdim=True)
    return centred * _again(deviation, centred, axes)


@rule_of("FusedRmsNorm")
def _rms_norm(call: NodeCall) -> Entry | None:
    x, deviation = call.saved("input"), call.saved("result1")
    axes = tuple(range(-len(call.operand.shape), 0))

    def normalised() -> Tensor:
        return x() * (_again(deviation(), x(), axes) if torch.is_grad_enabled() else deviation())

    return _scale_or_shift(call, normalised)


def _again(deviation: Tensor, x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Compute the reciprocal of a deviation again, with its derivatives."""
    square = x.square().mean(axes, keepdim=True)
    rest = (deviation.to(square.dtype).square().reciprocal() - square).detach()
    return (square + rest).rsqrt()


@rule_of("NativeGroupNorm")
def _group_norm(call: NodeCall) -> Entry | None:
    x, mean, deviation = call.saved("input"), call.saved("result1"), call.saved("result2")
    groups = call.option("group")

    def normalised() -> Tensor:
        grouped = x().unflatten(1, (groups, -1)).flatten(2)
        return _standardised(grouped, mean()[..., None], deviation()[..., None], (-1,)).reshape(x().shape)

    return _scale_or_shift(call, normalised, of_channels=True)


@rule_of(*NORMALISATIONS)
def _batch_norm(call: NodeCall) -> Entry | None:
    return _scale_or_shift(call, _of_batch(call), of_channels=True)


def _of_batch(call: NodeCall) -> Normalised:
    if not call.has_option("training"):
        return None
    x, eps = call.saved("input"), call.option("eps" if call.has_option("eps") else "epsilon")
    if call.option("training"):  # instance normalisation: one image with the channels of all samples
        return lambda: F.batch_norm(x(), None, None, training=True, eps=eps)
    mean, var = call.saved("running_mean"), call.saved("running_var")
    return lambda: F.batch_norm(x(), mean(), var(), eps=eps)


def _scale_or_shift(call: NodeCall, normalised: Normalised, of_channels: bool = False) -> Entry | None:
    """Return the entry of a weight or a bias; ``of_channels``: along axis 1, not along the last axes."""
    aligned = [1, call.operand.shape.numel(), *[1] * (len(call.shape) - 2)] if of_channels else None
    if call.place == 2:
        return scaled(call, aligned=aligned)
    if call.place == 0 or normalised is None:
        return None
    return scaled(call, normalised, aligned=aligned, linear=True)
