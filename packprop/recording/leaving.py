"""Leaving uses, losses and layers that mix samples on the nodes that they made."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor, nn

from packprop.functions.losses.description import input_of
from packprop.recording.marks import (
    CHOSEN,
    LOSS,
    MIXES,
    OUTPUT,
    REORDERS,
    TRANSFORMED,
    USE,
    ForwardCall,
    Mixer,
    RecordedLoss,
    RecordedUse,
    edge_of,
    marks_of,
)
from packprop.recording.transforms import node_under_transforms
from packprop.tensors.nesting import tensors_in
from packprop.tensors.state import version


def leave_use(use: RecordedUse, outputs: list[Tensor]) -> None:
    """Leave a use on the nodes that made its outputs."""
    for index, tensor in enumerate(outputs):
        node = tensor.grad_fn
        assert node is not None
        marks_of(node).setdefault(USE, []).append((use, index, tensor.output_nr))
        node.register_prehook(use.release)


def mark_output(forward: ForwardCall, tensor: Tensor, depends_on_samples: bool) -> None:
    """Mark what the outermost call returned, or that it ran inside a transform of ``torch.func``."""
    if tensor.grad_fn is not None:
        if depends_on_samples:
            marks_of(tensor.grad_fn)[OUTPUT] = (forward, tensor.output_nr, tensor.shape)
    elif (node := node_under_transforms(tensor)) is not None:
        marks_of(node)[TRANSFORMED] = forward


def mark_chosen(part: Any) -> None:
    """Mark a part of a parameter that data chose: it belongs to samples although none enters it."""
    if isinstance(part, Tensor) and part.grad_fn is not None:
        marks_of(part.grad_fn)[CHOSEN] = True


def mark_reordering(forward: ForwardCall, out: Any, axes: frozenset[int] | None) -> None:
    """Mark what differentiable rows were put in another order in, along some axes or none, ``None`` for any."""
    for tensor in tensors_in(out):
        if tensor.grad_fn is not None and axes is None:
            forward.reordered = True
        elif tensor.grad_fn is not None and axes is not None:
            marks_of(tensor.grad_fn)[REORDERS] = tensor.output_nr, tensor.shape, axes


def mark_mixing(forward: ForwardCall, out: Any) -> None:
    """Mark outputs with the layer that mixed samples: the module whose forward pass is running."""
    frame: FrameType | None = sys._getframe(1)
    module: Any = None
    while frame is not None and not isinstance(module, nn.Module):
        module = frame.f_locals.get("self")
        frame = frame.f_back
    mixer = Mixer(forward, type(module).__name__, (lambda: None) if module is None else weakref.ref(module))
    for tensor in tensors_in(out):
        if tensor.grad_fn is not None:
            marks_of(tensor.grad_fn)[MIXES] = mixer


def record_loss(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
    documents: Tensor | None = None,
) -> None:
    """Leave a loss on the node that it made, if its input is part of a graph.

    ``documents``: the document of each position of its input, if that was declared.
    """
    loss_input = input_of(function, args, kwargs)
    if not isinstance(loss_input, Tensor) or loss_input.grad_fn is None:
        return
    if isinstance(out, Tensor) and out.grad_fn is not None:
        edge = edge_of(loss_input)
        loss = RecordedLoss(
            function, args, kwargs, edge, loss_input.shape, version(loss_input), documents=documents
        )
        marks_of(out.grad_fn)[LOSS] = (loss, out.output_nr)
        out.grad_fn.register_prehook(loss.release)
