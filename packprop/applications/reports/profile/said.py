"""The model's answer on one sample: its loss, its class or, for a text, the loss of each token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packprop.engine.recording import disable
from packprop.engine.tensors import (
    LABELS,
    LossFunction,
    moved,
    outputs_and_loss,
    random_numbers_from,
    random_states,
)

IGNORED = -100
"""The target that torch's cross entropy leaves out by default."""


@dataclass(frozen=True)
class Said:
    """The model's answer on one sample.

    Args:
        loss: The loss of this sample alone; ``None`` if the model could not be run on it alone.
        output: The outputs as text; ``None`` if they are classes neither of samples nor of tokens.
        token_losses: The loss of each token of the targets, if the sample is a text; it has ``None`` for tokens
            without a loss.
    """

    loss: float | None = None
    output: str | None = None
    token_losses: list[float | None] | None = None


def said_of(
    asked: str, model: nn.Module, loss: LossFunction | None, inputs: Any, targets: Any, device: torch.device
) -> Said:
    """Run a model on one sample, with a leading axis of extent one.

    Args:
        asked: The call of the user, for errors.
        model: The model.
        loss: As for ``profile``.
        inputs: The sample's inputs.
        targets: Its targets.
        device: The device of the model.
    """
    inputs, targets = moved((inputs, targets), device)
    try:
        with torch.no_grad(), disable(), random_numbers_from(random_states([device])):
            outputs, value = outputs_and_loss(asked, model, loss, inputs, targets)
    except Exception:  # a model may need more than one sample; then its answer is unknown
        return Said()
    logits, labels = _logits_of(outputs), _labels_of(inputs, targets)
    if logits is None or labels is None:
        return Said(float(value))
    if logits.dim() == 2 and labels.dim() == 1 and logits.shape[1] > 1:
        named = getattr(loss, "__name__", type(loss).__name__)
        chance = logits[0].float().softmax(0).max() if named in ("CrossEntropyLoss", "cross_entropy") else None
        said = str(int(logits[0].argmax()))
        return Said(float(value), said if chance is None else f"{said} ({float(chance):.0%})")
    return _of_tokens(logits, labels, float(value))


def _logits_of(outputs: Any) -> Tensor | None:
    """Return the tensor in a model's output: itself, or ``logits`` of Hugging Face's models."""
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    return found if isinstance(found, Tensor) and found.is_floating_point() else None


def _labels_of(inputs: Any, targets: Any) -> Tensor | None:
    found = inputs.get(LABELS) if targets is None and isinstance(inputs, Mapping) else targets
    return found if isinstance(found, Tensor) and not found.is_floating_point() else None


def _of_tokens(logits: Tensor, labels: Tensor, value: float) -> Said:
    """Return the loss of each token, and count right tokens, by the reading that gives the sample's loss."""
    readings = []
    for losses, right in _readings(logits.float(), labels):
        known = [each for each in losses if each is not None]
        total = math.fsum(known)
        readings += [(abs(each - value), losses, right) for each in (total / len(known), total)]
    near, losses, right = min(readings, key=lambda reading: reading[0], default=(math.inf, [], 0))
    precision = max(1e-4, torch.finfo(logits.dtype).eps)
    if not near <= precision * max(abs(value), 1.0):
        return Said(value)
    counted = sum(each is not None for each in losses)
    return Said(value, f"{right} of {counted} tokens right", losses)


def _readings(logits: Tensor, labels: Tensor) -> Iterator[tuple[list[float | None], int]]:
    """Yield losses of tokens and the number of right ones, for each way to pair outputs with targets."""
    if labels.dim() != 2 or logits.dim() != 3 or len(logits) != 1:
        return
    if logits.shape[:2] == labels.shape:
        yield from _token_losses(logits[0], labels[0])
        # a causal model that shifts the labels itself: it does not predict the first
        for losses, right in _token_losses(logits[0, :-1], labels[0, 1:]):
            yield [None, *losses], right
    if logits.shape[::2] == labels.shape:  # classes on axis 1, as torch's losses have them
        yield from _token_losses(logits[0].T, labels[0])


def _token_losses(logits: Tensor, labels: Tensor) -> Iterator[tuple[list[float | None], int]]:
    """Yield losses and right tokens for logits ``[t, c]`` if labels ``[t]`` are classes, not all ignored."""
    counted = labels != IGNORED
    known = labels[counted]
    if not len(known) or int(known.min()) < 0 or int(known.max()) >= logits.shape[1]:
        return
    losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED).tolist()
    found = [each if use else None for each, use in zip(losses, counted.tolist(), strict=True)]
    yield found, int((logits.argmax(1) == labels).sum())
