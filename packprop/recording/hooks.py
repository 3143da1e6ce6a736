"""Hooks of the user's on tensors, seen when they are registered.

# NOTE [Hooks on tensors]
Autograd keeps the hooks of a tensor on the node that made it, where nothing shows them, also when nobody holds
the tensor any more. packprop differentiates a graph more often than its user asked for, and must keep these
hooks quiet (NOTE [Quiet hooks]). So once a module was extended, ``Tensor.register_hook`` leaves the dictionary
of the hooks in the ``metadata`` of that node, and ``retain_grad`` leaves a reference to its tensor. Both do
what they did before.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from packprop.recording.marks import note_hooks, note_retained

_register_hook = Tensor.register_hook


@functools.wraps(_register_hook)
def _noted(tensor: Tensor, hook: Any) -> Any:
    handle = _register_hook(tensor, hook)  # type: ignore[no-untyped-call]  # torch's own
    note_hooks(tensor)
    return handle


_retain_grad = Tensor.retain_grad


@functools.wraps(_retain_grad)
def _retained(tensor: Tensor) -> None:
    _retain_grad(tensor)
    note_retained(tensor)


def watch_hooks() -> None:
    """Note hooks on tensors from now on."""
    if Tensor.register_hook is not _noted:
        Tensor.register_hook = _noted  # type: ignore[method-assign]  # there is no other way to see it
        Tensor.retain_grad = _retained  # type: ignore[assignment,method-assign]  # nor this
