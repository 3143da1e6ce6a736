"""Calls of modules that ask whether a torch-function mode is in force, during which none of packprop's is.

# NOTE [Stepping aside]
Attention modules compute otherwise where nothing is differentiated and no torch-function mode is in force: an
encoder then leaves padded positions out, and returns zeros there. Recording is such a mode, so it would change
what a frozen encoder computes. There is nothing to record in such a call. So packprop takes its modes off for
as long as it lasts; if the inputs depend on the samples, so do the outputs, of the modules inside, too. Where
there is another mode, PyTorch takes the slow path without packprop, too, and the modes stay.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from packprop.tensors.nesting import tensors_in

CHOOSERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Modules of PyTorch that compute otherwise under a torch-function mode."""


TRACER = "torch.fx.experimental.proxy_tensor"
"""The Python module of PyTorch with the mode that is in force while packprop traces a pass."""


class OwnMode(TorchFunctionMode):
    """A torch-function mode of packprop's, which can be taken off for a while."""


class Nesting:
    """Which of the calls that are made one inside the other is the outermost one."""

    def __init__(self) -> None:
        self.outermost: object | None = None
        """What was called first: a module, or anything else that is entered and left."""
        self._depth = 0

    def enter(self, called: object) -> bool:
        """Begin a call; whether it is the outermost one."""
        if self.outermost is None:
            self.outermost = called
        elif self.outermost is not called:
            return False
        self._depth += 1
        return self._depth == 1

    def leave(self, called: object) -> bool:
        """End a call; whether it was the outermost one."""
        if self.outermost is not called:
            return False
        self._depth -= 1
        if self._depth == 0:
            self.outermost = None
        return self._depth == 0


@dataclass
class Absence:
    """A call of a module during which the modes are off.

    Args:
        owner: The Python frame of the call.
        modes: What was taken off, the outermost first.
        nesting: Calls of the module.
    """

    owner: FrameType
    modes: list[OwnMode]
    nesting: Nesting


class _Current(threading.local):
    absence: Absence | None = None


current = _Current()
"""The call in this thread during which the modes are off."""


def chooses_freely(module: nn.Module, inputs: Any) -> bool:
    """Whether what a module computes would depend on packprop's modes, and on no other one."""
    if not isinstance(module, CHOOSERS):
        return False
    tensors: Iterator[Tensor] = tensors_in((list(module.parameters()), inputs))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    return _no_other_mode_in_force()


def step_aside(module: nn.Module, owner: FrameType) -> None:
    """Take the modes off while a module is called, until ``step_back``."""
    nesting = Nesting()
    nesting.enter(module)
    modes = _modes_in_force()
    for mode in reversed(modes):
        TorchFunctionMode.__exit__(mode, None, None, None)
    current.absence = Absence(owner, modes, nesting)


def step_back() -> None:
    """Put the modes back."""
    absence, current.absence = current.absence, None
    for mode in absence.modes if absence is not None else ():
        TorchFunctionMode.__enter__(mode)


def end_stale_absence() -> None:
    """Put the modes back if the call that they are off for was interrupted: its closing hook did not run."""
    if current.absence is not None and not is_running(current.absence.owner):
        step_back()


def is_running(owner: FrameType, asker: object = None) -> bool:
    """Whether a Python frame is among those that are running in this thread.

    To go through them one by one takes long. Who asks again is mostly as far away as the last time.

    Args:
        owner: The frame.
        asker: Who asks.
    """
    distance = _distances.get(id(asker), 0)
    try:
        if distance and sys._getframe(distance) is owner:
            return True
    except ValueError:  # there are not as many frames
        pass
    frame: FrameType | None = sys._getframe(1)
    distance = 1
    while frame is not None and frame is not owner:
        frame, distance = frame.f_back, distance + 1
    if len(_distances) > MANY:
        _distances.clear()
    _distances[id(asker)] = distance
    return frame is not None


MANY = 10000


_distances: dict[int, int] = {}
"""How many frames away the owner was when somebody asked last, by identity: a guess, for whoever has it now."""


def _modes_in_force() -> list[Any]:
    """The torch-function modes of this thread, the outermost first.

    Asks a private function: nothing public tells whose modes are in force.
    """
    return list(torch.overrides._get_current_function_mode_stack())


def _no_other_mode_in_force() -> bool:
    """Whether all torch-function modes are packprop's own, or that of ``make_fx``, which only keeps notes."""
    return all(isinstance(mode, OwnMode) or type(mode).__module__ == TRACER for mode in _modes_in_force())
