"""What is done with one program, in whichever process."""

from __future__ import annotations

import torch

from tests.hunt.outcomes import Outcome, hunt


def start() -> None:
    """Begin a process of one thread."""
    torch.set_num_threads(1)


def examine(seed: int, passes: int = 1) -> tuple[int, str, tuple[str, ...], list[Outcome]]:
    """What travels between processes about one program."""
    program, outcomes = hunt(seed, passes=passes)
    return seed, program.text, program.tags, outcomes
