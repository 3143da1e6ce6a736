"""Calls of modules that ask whether a torch-function mode is in force, during which none of packprop's is.

# NOTE [Stepping aside]
Attention modules compute otherwise where nothing is differentiated and no torch-function mode is in force: an
encoder then leaves padded positions out, and returns zeros there. Recording is such a mode, so it would change
what a frozen encoder computes. There is nothing to record in such a call, nor in calls of modules inside it.
So packprop takes its modes off until the call ends. If another mode is in force, PyTorch takes the slow path
in any case, and packprop's modes stay.
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
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from packprop.engine.recording.unrecorded import is_traced_over
from packprop.engine.tensors.nesting import tensors_in

CHOOSERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Modules of PyTorch that compute otherwise under a torch-function mode."""


TRACER = "torch.fx.experimental.proxy_tensor"
"""The Python module of PyTorch with the mode that is in force while packprop traces a pass."""


unseen = torch._C.DisableTorchFunction
"""A context in which no torch-function mode sees which attributes packprop reads.

It is private. Under a mode each attribute of a tensor costs a call of a Python function, and a mode of the
user's has no business with what packprop reads.
"""


class OwnMode(TorchFunctionMode):
    """A torch-function mode of packprop's, which can be taken off for a while."""


@dataclass
class Absence:
    """A call of a module, made by the Python frame ``owner``, during which the modes are off.

    Args:
        modes: The modes that were taken off, the outermost first.
        depth: Number of calls of the module that are running, one inside the other.
    """

    module: nn.Module
    owner: FrameType
    modes: list[OwnMode]
    depth: int = 1


class _Current(threading.local):
    absence: Absence | None = None


current = _Current()
"""The call in this thread during which the modes are off."""


def step_aside(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Take the modes off before a call of a module that would compute otherwise under them; a hook."""
    if is_compiling() or is_traced_over():
        return
    end_stale_absence()
    if (absence := current.absence) is not None:
        absence.depth += module is absence.module
    elif _chooses_freely(module, (args, kwargs)):
        current.absence = Absence(module, sys._getframe(1), _modes_in_force())
        for mode in reversed(current.absence.modes):
            TorchFunctionMode.__exit__(mode, None, None, None)


def step_back(module: nn.Module, args: Any, output: Any) -> None:
    """Put the modes back after the call that they were taken off for; a hook."""
    if (absence := current.absence) is not None and module is absence.module:
        absence.depth -= 1
        if not absence.depth:
            _put_back(absence)


def end_stale_absence() -> None:
    """Put the modes back if the call that they are off for was interrupted: its closing hook did not run."""
    if (absence := current.absence) is not None and not is_running(absence.owner):
        _put_back(absence)


def _put_back(absence: Absence) -> None:
    current.absence = None
    for mode in absence.modes:
        TorchFunctionMode.__enter__(mode)


def is_running(owner: FrameType) -> bool:
    """Tell whether a Python frame is among those that are running in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not owner:
        frame = frame.f_back
    return frame is not None


def _modes_in_force() -> list[Any]:
    """The torch-function modes of this thread, the outermost first: no public function tells whose they are."""
    return list(torch.overrides._get_current_function_mode_stack())


def _chooses_freely(module: nn.Module, inputs: Any) -> bool:
    """Tell whether the values of a module would depend on packprop's modes, and on no other one.

    The mode of ``make_fx`` does not count: it only keeps notes.
    """
    tensors: Iterator[Tensor] = tensors_in((list(module.parameters()), inputs))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    return all(isinstance(mode, OwnMode) or type(mode).__module__ == TRACER for mode in _modes_in_force())
