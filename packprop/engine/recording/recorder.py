"""Marks at losses: the function, arguments and declarations of a call, kept on the node that it made.

# NOTE [Stepping aside]
Attention modules take a fast path if nothing is differentiated and no torch-function mode is in force: an
encoder then leaves padded positions out, and returns zeros there. A recorder of losses is such a mode, so it
would change the output of a frozen encoder. There is nothing to record in such a call, nor in calls of modules
inside it. So packprop switches its modes off until the call ends. If another mode is in force, PyTorch takes
the slow path in any case, and packprop's modes stay.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, MethodWrapperType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from packprop.engine.functions.losses.description import LOSSES, input_of, output_first
from packprop.engine.functions.losses.read import tells_its_loss
from packprop.engine.functions.losses.rules import COMPOSITES, body_of, has_parts
from packprop.engine.functions.nodes import number_of_node
from packprop.engine.recording.marks import LOSS, OUTPUT, TOLD, ForwardCall, RecordedLoss, marks_of
from packprop.engine.tensors.nesting import tensors_in, tensors_of_call
from packprop.engine.tensors.state import version


class _Current(threading.local):
    recorder: LossRecorder | None = None
    disabled: bool = False
    absence: tuple[nn.Module, list[TorchFunctionMode]] | None = None


current = _Current()
"""State of this thread: the recorder, whether recording is disabled, and a module whose call no mode sees.

``absence`` holds this module, and the modes that are off, the outermost first.
"""


unseen = torch._C.DisableTorchFunction
"""A context in which no torch-function mode sees the attributes that packprop reads.

It is private. Under a mode, each attribute of a tensor costs a call of a Python function, and a user's mode
should not see what packprop reads.
"""


class LossRecorder(TorchFunctionMode):
    """A mode that marks losses whose functions are called while it is in force.

    Args:
        owner: The Python frame of the module call that ends it; ``None`` if something else ends it.
        module: The loss module of that call.
        sample_axis: The axis of these losses' inputs that holds the samples.
        documents: The document of each position of these inputs.
    """

    def __init__(
        self,
        owner: FrameType | None,
        sample_axis: int | None = None,
        documents: Tensor | None = None,
        module: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.owner, self.sample_axis, self.documents, self.module = owner, sample_axis, documents, module
        self.outer = current.recorder
        if self.outer is not None:  # its declarations also hold here
            self.sample_axis = self.outer.sample_axis if sample_axis is None else sample_axis
            self.documents = self.outer.documents if documents is None else documents
        self.has_loss = self.has_output = False
        """True once a loss was recorded, and once an extended model was called."""

    @property
    def is_stale(self) -> bool:
        """Tell whether the call that ends the recorder was interrupted, so its closing hook did not run."""
        return self.owner is not None and not is_running(self.owner)

    def start(self) -> LossRecorder:
        """Begin to see losses, in place of the previous recorder."""
        current.recorder = self
        self.__enter__()  # type: ignore[no-untyped-call]  # torch's own
        return self

    def stop(self) -> None:
        """Stop seeing losses; the previous recorder sees them again."""
        if current.absence is not None and self in current.absence[1]:  # its call was interrupted
            _put_back()
        current.recorder = self.outer
        if self.outer is not None:
            self.outer.has_loss |= self.has_loss
            self.outer.has_output |= self.has_output
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if type(func) is MethodWrapperType or is_compiling():
            return func(*args, **kwargs)
        if func in COMPOSITES and has_parts(kwargs) and not _has_other_classes(args, kwargs):
            with self:
                return body_of(func)(*args, **kwargs)
        out = func(*args, **kwargs)
        if func in LOSSES and current.recorder is self and not (current.disabled or self.is_stale):
            self.note(func, args, kwargs, out)
        return out

    def note(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Mark the node that a loss made, with the declared axis and documents."""
        self.has_loss = True
        with unseen():
            mark_loss(function, args, kwargs, out, self.sample_axis, self.documents)


CHOOSERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Modules of PyTorch that take another path under a torch-function mode."""


WATCHING = ("packprop.", "torch.fx.experimental.proxy_tensor")
"""Python modules with modes that only watch: packprop's own, and that of ``make_fx``."""


def step_aside(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Switch modes off before a call of a module that would take another path under them; a hook."""
    if is_compiling() or current.recorder is None or current.absence is not None:
        return
    tensors: Iterator[Tensor] = tensors_in((list(module.parameters()), args, kwargs))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return
    modes: list[Any] = torch.overrides._get_current_function_mode_stack()  # no public function says whose
    if all(type(mode).__module__.startswith(WATCHING) for mode in modes):
        current.absence = module, modes
        for mode in reversed(modes):
            TorchFunctionMode.__exit__(mode, None, None, None)


def step_back(module: nn.Module, args: Any, output: Any) -> None:
    """Switch modes on again after the call that they were switched off for; a hook."""
    if current.absence is not None and current.absence[0] is module:
        _put_back()


def _put_back() -> None:
    assert current.absence is not None
    (_, modes), current.absence = current.absence, None
    for mode in modes:
        TorchFunctionMode.__enter__(mode)


def is_running(owner: FrameType) -> bool:
    """Tell whether a Python frame is among those that are running in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not owner:
        frame = frame.f_back
    return frame is not None


def _has_other_classes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a tensor is of another class, which may override functions."""
    return any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors_in((args, kwargs)))


def mark_loss(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
    declared: int | None = None,
    documents: Tensor | None = None,
) -> None:
    """Mark the node of a loss that returned ``out``, if the loss's input is part of a graph.

    If the node tells the call by itself, the mark does not keep the arguments alive. ``declared`` and
    ``documents`` are those of ``RecordedLoss``.
    """
    args, kwargs = output_first(function, args, kwargs)
    given = input_of(function, args, kwargs)
    if not isinstance(given, Tensor) or given.grad_fn is None:
        return
    if not isinstance(out, Tensor) or out.grad_fn is None:
        return
    target = args[1] if len(args) > 1 else kwargs.get("target")
    if declared is None and documents is None and tells_its_loss(out.grad_fn, function, given, target):
        marks_of(out.grad_fn)[TOLD] = True
        return
    loss = RecordedLoss(
        function,
        args,
        kwargs,
        get_gradient_edge(given),
        given.shape,
        version(given),
        number=number_of_node(out.grad_fn),
        declared=declared,
        documents=documents,
    )
    marks_of(out.grad_fn)[LOSS] = (loss, out.output_nr)
    out.grad_fn.register_prehook(loss.release)


def mark_outputs(module: nn.Module, declared: int | None, args: Any, kwargs: Any, output: Any) -> None:
    """Mark the outputs of a call of an extended model; not inside ``vmap``, where any axis may hold samples."""
    forward = None
    for tensor in tensors_of_call((output,), {}, as_far_as_readable=True):
        node = tensor.grad_fn
        if forward is None:
            forward = ForwardCall(weakref.ref(module), declared, args, kwargs)
        if node is not None and not (tensor.is_nested and tensor.layout == torch.strided):
            marks = marks_of(node).setdefault(OUTPUT, {})
            if forward.declared is None and tensor.output_nr in marks:  # a wrapper returns what is inside it
                forward.declared = marks[tensor.output_nr][0].declared
            marks[tensor.output_nr] = forward, tensor.shape
