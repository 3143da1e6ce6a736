"""Which hooks on saved tensors are in force, and whether they belong to a checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import MethodWrapperType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from packprop.functions.traits import METADATA
from packprop.tensors.nesting import tensors_in

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What packs a tensor when it is saved, and what unpacks it."""


_top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def hooks_in_force() -> Hooks | None:
    """The hooks that autograd gives to what it saves now.

    Asks a private function, as no public one tells whether there are any hooks; without hooks, inputs are held
    as they are, at no cost. PyTorch 2.6 cannot be asked: there, inputs are held under all hooks.
    """
    return None if _top is None else _top(False)


def is_checkpoint(hooks: Hooks) -> bool:
    """Whether hooks belong to ``torch.utils.checkpoint``."""
    return getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def frame_of(hooks: Hooks) -> tuple[Any, bool]:
    """The frame in which a checkpoint keeps its state, and whether its region is being run again.

    Reads private parts of ``torch.utils.checkpoint``: nothing public says which region a tensor belongs to, or
    when a region is run again. Where these parts are not found, inputs are held.
    """
    pack = getattr(hooks[0], "__wrapped__", hooks[0])
    for cell in getattr(pack, "__closure__", None) or ():
        content = cell.cell_contents
        again = isinstance(content, weakref.ref)
        frame = content() if again else content
        has_inputs = hasattr(frame, "get_inputs") or hasattr(frame, "input_saver")
        if has_inputs and hasattr(frame, "recompute_fn") and hasattr(frame, "recomputed"):
            return frame, again
    return None, False


def inputs_of(frame: Any) -> Sequence[Any]:
    """What the checkpoint of a frame calls its function with, when it runs it again."""
    if hasattr(frame, "get_inputs"):
        return tuple(frame.get_inputs())
    saver = frame.input_saver.grad_fn  # up to PyTorch 2.10 a node keeps them
    return tuple(saver.get_args(saver.saved_tensors))


def may_be_counted(hooks: Hooks | None) -> bool:
    """Whether a checkpoint may count what is computed now, and expect as much when its function runs again.

    One with contexts of its own (``context_fn``) does: modes that see every operation. So does one whose
    function runs again. Where hooks cannot be asked for, every such mode may belong to a checkpoint.
    """
    if hooks is None:
        return _top is None and is_in_torch_dispatch_mode()
    return is_checkpoint(hooks) and (is_in_torch_dispatch_mode() or frame_of(hooks)[1])


def is_counted(function: Callable[..., Any], arguments: Any) -> bool:
    """Whether a call has a number in its region.

    What the checkpoint itself calls has none, because it differs from one run to the next: it reads attributes,
    switches gradients on and off (a function of no tensor), and detaches. What recording asks for has none
    either, nor what returns no tensor.
    """
    if isinstance(function, MethodWrapperType) or function is Tensor.detach or function in METADATA:
        return False
    return next(tensors_in(arguments), None) is not None
