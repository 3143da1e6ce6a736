"""What is done with one program, in whichever process."""

from __future__ import annotations

import torch

from tests.hunt.outcomes import Outcome, hunt
from tests.seeding import DEVICE


def start() -> None:
    """Begin a process of one thread, whose programs make their tensors on the device of the tests."""
    torch.set_num_threads(1)
    if DEVICE.type != "cpu":
        torch.set_default_device(DEVICE)


def examine(seed: int, passes: int = 1) -> tuple[int, str, tuple[str, ...], list[Outcome]]:
    """What travels between processes about one program."""
    program, outcomes = hunt(seed, passes=passes)
    return seed, program.text, program.tags, outcomes
