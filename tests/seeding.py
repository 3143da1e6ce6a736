"""Random numbers that are the same in every run of a test, and the device that its cases run on."""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(os.environ.get("PACKPROP_TEST_DEVICE", "cpu"))
"""The device of the cases; their data come from the CPU's generator, and the oracle stays on the CPU."""


if DEVICE.type != "cpu":  # all digits of single precision, also in convolutions and recurrent layers
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def seed(number: int) -> None:
    """As ``torch.manual_seed``, which without a GPU formats three stack traces at each call."""
    if torch.cuda.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)
