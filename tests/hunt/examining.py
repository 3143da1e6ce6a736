"""What is done with one program, in whichever process."""

from __future__ import annotations

import torch

from packprop.recording import witnesses
from tests.hunt.outcomes import Outcome, hunt


def start(large: bool = False) -> None:
    """Begin a process of one thread; ``large``: as if inputs were too large to be copied without a need."""
    torch.set_num_threads(1)
    if large:
        witnesses.CHEAP = 0


def examine(seed: int) -> tuple[int, str, tuple[str, ...], list[Outcome]]:
    """What travels between processes about one program."""
    program, outcomes = hunt(seed)
    return seed, program.text, program.tags, outcomes
