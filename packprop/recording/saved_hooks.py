"""Hooks on saved tensors that are in force, and whether they are those of a checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodWrapperType
from typing import Any

import torch
from torch import Tensor

from packprop.tensors.nesting import tensors_in

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def hooks_in_force() -> Hooks | None:
    """Hooks that what autograd saves now is given to.

    Private, and asked for a reason: no public function tells whether there are any, and without them inputs
    are held as they are, at no cost. PyTorch 2.6 cannot be asked: there, inputs are held under all hooks.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(False)


def is_checkpoint(hooks: Hooks) -> bool:
    """Whether hooks are those of ``torch.utils.checkpoint``."""
    return getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def frame_of(hooks: Hooks) -> tuple[Any, bool]:
    """What a checkpoint knows of its region, and whether it is being run again.

    Private parts of ``torch.utils.checkpoint``: nothing public says which region a tensor belongs to, or when
    one is run again. Where they are not found inputs are held.
    """
    pack = getattr(hooks[0], "__wrapped__", hooks[0])
    for cell in getattr(pack, "__closure__", None) or ():
        held = cell.cell_contents
        again = isinstance(held, weakref.ref)
        frame = held() if again else held
        if hasattr(frame, "recompute_fn") and hasattr(frame, "get_inputs") and hasattr(frame, "recomputed"):
            return frame, again
    return None, False


def is_counted(function: Callable[..., Any], arguments: Any) -> bool:
    """Whether a call has a number in its region.

    What a checkpoint calls by itself has none, as it differs from one time to the next: it reads attributes,
    switches gradients on and off (a function of no tensor), and detaches. Nor has what recording asks for.
    """
    if isinstance(function, MethodWrapperType) or function in (Tensor.detach, Tensor.stride):
        return False
    return next(tensors_in(arguments), None) is not None
