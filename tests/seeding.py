"""Random numbers that are the same in every run of a test."""

from __future__ import annotations

import torch


def seed(number: int) -> None:
    """As ``torch.manual_seed``, which without a GPU formats three stack traces at each call."""
    if torch.cuda.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)
