"""What a family is: a tiny model with random weights, as its library builds it, and a few samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES = 3
"""Samples of each batch."""

WORDS = 13
"""Words of each vocabulary."""


@dataclass(frozen=True)
class Family:
    """A model and its inputs.

    Attributes:
        library: Where it comes from.
        name: Its name there.
        model: Builds it.
        inputs: Makes keyword arguments, tensors with the samples on their leading axis.
        output: From what the model returns to the tensor that the loss is given.
        double: Whether the model runs in double precision.
    """

    library: str
    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    output: Callable[[Any], Tensor]
    double: bool = True


def first_tensor(made: Any) -> Tensor:
    """The tensor that a head would be put on: logits, the last hidden state, or the first one there is."""
    for name in ("logits", "last_hidden_state", "prediction_logits", "start_logits"):
        value = getattr(made, name, None)
        if isinstance(value, Tensor):
            return value
    while not isinstance(made, Tensor):
        made = next(iter(made.values())) if isinstance(made, dict) else made[0]
    return made


def tokens(length: int = 5) -> Callable[[], dict[str, Tensor]]:
    """Words ``[n, t]``, none of which is padding."""
    return lambda: {"input_ids": torch.randint(3, WORDS, (SAMPLES, length))}


def translated(length: int = 4) -> Callable[[], dict[str, Tensor]]:
    """Words of a source and of a target."""
    return lambda: {
        "input_ids": torch.randint(3, WORDS, (SAMPLES, length)),
        "decoder_input_ids": torch.randint(3, WORDS, (SAMPLES, length - 1)),
    }


def pixels(size: int, name: str = "pixel_values", channels: int = 3) -> Callable[[], dict[str, Tensor]]:
    """Images ``[n, c, h, w]``."""
    return lambda: {name: torch.randn(SAMPLES, channels, size, size)}


def features(*shape: int, name: str = "x") -> Callable[[], dict[str, Tensor]]:
    """Random numbers ``[n, *shape]``."""
    return lambda: {name: torch.randn(SAMPLES, *shape)}
