"""The state of the random generators."""

from __future__ import annotations

import torch
from torch import Tensor


def random_state() -> list[Tensor]:
    """State of the generators of the CPU and of every initialised CUDA device."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return states


def set_random_state(states: list[Tensor]) -> None:
    """Put back what ``random_state`` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])
