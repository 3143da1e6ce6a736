"""Switching recording on and off: ``extend``, ``record``, ``disable``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from packprop.errors import BadInput
from packprop.recording import aside
from packprop.recording.axes import AXIS, check_documents, check_sample_axis
from packprop.recording.compiled import is_traced_over, note_compiled
from packprop.recording.hooks import watch_hooks
from packprop.recording.marks import EXTENDED, HANDLES, LOSS, Handles, marks_of, nodes_above
from packprop.recording.recorder import LossRecorder, current, mark_outputs, require_loss

# What goes in comes out, and a type checker knows it for what it is.
Module = TypeVar("Module", bound=nn.Module)


def extend(
    module: Module,
    use_converter: bool = False,
    debug: bool = False,
    sample_axis: int | None = None,
) -> Module:
    """Prepare a model or a loss for ``backpack``, in place; return it.

    A model tells packprop the names of its parameters, the axis of the samples, and where its output ends. A
    loss module keeps what it was given until the backward pass. The forward pass does not change: the module,
    its parameters, its ``state_dict`` and its outputs stay what they are. You may call submodules alone.
    A copy (``deepcopy``, pickle) is extended, too. Extending twice changes nothing; ``restore`` undoes it.

    A model need not be extended where a loss function of torch or an extended loss shows where it ends. Its
    parameters then have no names in errors, and the samples are rows along axis 0.

    An encoder layer of PyTorch in evaluation mode does not take its one fused kernel where a module has hooks,
    such as packprop's. Its outputs are then the same up to rounding.

    Args:
        module: Any module, as its author wrote it, or a loss module.
        use_converter: Accepted for existing code; nothing needs to be converted.
        debug: Accepted for existing code.
        sample_axis: The axis of what the loss takes that holds the samples, 0 if you leave it out: 1 for a
            model that returns ``[t, n, c]``. If you flatten positions in front of the loss, it is the axis of
            the tensor that you flatten. The model's inputs play no part. The declaration belongs to calls of
            this module, not of its children.

    Raises:
        BadInput: If ``module`` is not an instance of ``torch.nn.Module``, or ``sample_axis`` is no declaration;
            for a second module.
    """
    if not isinstance(module, nn.Module):
        what = module.__name__ if isinstance(module, type) else type(module).__name__
        raise BadInput(
            "extend(module) was called.",
            f"argument of type {'class ' if isinstance(module, type) else ''}{what}",
            "only instances of torch.nn.Module can be extended",
            f"extend({what}()) to extend an instance; for a loss function use packprop.record()"
            if isinstance(module, type)
            else "pass a module; for a loss function, call it inside `with packprop.record():`",
        )
    for name, value in {"use_converter": use_converter, "debug": debug}.items():
        if not isinstance(value, bool):
            raise BadInput(
                f"extend(module, ...) was called with {name}={type(value).__name__}(...).",
                f"{name}, which comes after the module",
                "it is True or False; one call extends one module",
                "extend(model); extend(loss)",
            )
    if sample_axis is not None:
        check_sample_axis("extend(module, sample_axis=...) was called.", sample_axis)
        module.__dict__[AXIS] = sample_axis
    EXTENDED.add(module)
    if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
        return module
    if HANDLES not in module.__dict__:
        if next(module.parameters(), None) is None:
            begin = module.register_forward_pre_hook(_begin_loss)
            end = module.register_forward_hook(_end_loss, with_kwargs=True, always_call=True)
            module.__dict__[HANDLES] = Handles(module, [begin, end])
        else:
            handle = module.register_forward_hook(_mark_outputs, with_kwargs=True)
            module.__dict__[HANDLES] = Handles(module, [handle])
    for child in module.modules():
        if isinstance(child, aside.CHOOSERS) and CHOOSING not in child.__dict__:
            child.__dict__[CHOOSING] = [
                child.register_forward_pre_hook(_step_aside, with_kwargs=True),
                child.register_forward_hook(_step_back, always_call=True),
            ]
    watch_hooks()
    return module


CHOOSING = "_packprop_choosing"
"""Attribute of an attention module: the handles of hooks that take packprop's modes off in its calls."""


def restore(module: Module) -> Module:
    """Undo ``extend`` on a module and its submodules; returns it."""
    for child in module.modules():
        EXTENDED.discard(child)
        child.__dict__.pop(AXIS, None)
        for handle in (*child.__dict__.pop(HANDLES, ()), *child.__dict__.pop(CHOOSING, ())):
            handle.remove()
    return module


@contextlib.contextmanager
def extended(model: nn.Module) -> Iterator[None]:
    """Extend a model inside, and leave its modules as they were."""
    extended_before = [module for module in model.modules() if is_extended(module)]
    extend(model)
    try:
        yield
    finally:
        restore(model)
        for module in extended_before:
            extend(module)


def is_extended(module: nn.Module) -> bool:
    """Whether ``extend`` was called on this module."""
    return HANDLES in module.__dict__


def _is_left_alone() -> bool:
    """Whether nothing is marked: under ``disable``, without gradients, or while a compiler runs the module."""
    if (compiles := is_compiling()) or is_traced_over():
        if compiles:
            note_compiled()
        return True
    return current.disabled or not torch.is_grad_enabled()


def _mark_outputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    # torch.jit.script compiles hooks, and cannot compile this one: call packprop.restore(model) before
    if not _is_left_alone():
        mark_outputs(module, module.__dict__.get(AXIS), args, kwargs, output)


def _begin_loss(module: nn.Module, args: tuple[Any, ...]) -> None:
    # torch.jit.script compiles hooks, and cannot compile this one: call packprop.restore(loss) before
    if _is_left_alone():
        return
    drop_stale_recording()
    if current.recorder is None:
        current.recorder = LossRecorder(sys._getframe(1), module.__dict__.get(AXIS))
        current.recorder.__enter__()  # type: ignore[no-untyped-call]  # torch's own


def _end_loss(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    if _is_left_alone():
        return
    recorder = current.recorder
    if recorder is None:
        return
    if recorder.owner is not None:
        _stop(recorder)
    if output is not None:
        _record_own_loss(recorder, module, args, kwargs, output)


def _step_aside(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Take packprop's modes off for a module that would compute otherwise beside them."""
    # torch.jit.script compiles hooks, and cannot compile this one: call packprop.restore(model) before
    if is_compiling() or is_traced_over():
        return
    aside.end_stale_absence()
    if (absence := aside.current.absence) is not None:
        absence.nesting.enter(module)
    elif aside.chooses_freely(module, (args, kwargs)):
        aside.step_aside(module, sys._getframe(1))


def _step_back(module: nn.Module, args: Any, output: Any) -> None:
    if (absence := aside.current.absence) is not None and absence.nesting.leave(module):
        aside.step_back()


def _record_own_loss(recorder: LossRecorder, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
    """Record a user's own loss: a module without parameters that turns a model's output into a scalar."""
    if not isinstance(out, Tensor) or out.ndim > 0 or out.grad_fn is None:
        return
    if len(args) + len(kwargs) < 2:
        return
    loss_input = args[0] if args else kwargs.get("input")
    if not isinstance(loss_input, Tensor) or loss_input.grad_fn is None or _has_loss(out, loss_input):
        return
    recorder.note(_UnrecordedLoss(module), args, kwargs, out)


class _UnrecordedLoss:
    """A loss module that can be evaluated again without being recorded; equal for every call of the module."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.module_class = module, type(module)
        self.reduction = getattr(module, "reduction", None)
        self.__name__ = type(module).__name__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _UnrecordedLoss) and other.module is self.module

    def __hash__(self) -> int:
        return hash(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with disable():
            return self.module(*args, **kwargs)


def _has_loss(out: Tensor, loss_input: Tensor) -> bool:
    """Whether a recorded loss stands between a loss module's output and its input."""
    assert out.grad_fn is not None
    if out.grad_fn is loss_input.grad_fn:
        return False
    return any(LOSS in marks_of(node) for node in nodes_above([out.grad_fn], loss_input.grad_fn))


def _stop(recorder: LossRecorder) -> None:
    current.recorder = None
    recorder.owner = None
    recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own


def drop_stale_recording() -> None:
    """End a recording whose call was interrupted, so that its closing hook did not run."""
    aside.end_stale_absence()
    recorder = current.recorder
    if recorder is not None and recorder.stale:
        _stop(recorder)


@contextlib.contextmanager
def record(*inputs: Any, sample_axis: int | None = None, documents: Tensor | None = None) -> Iterator[None]:
    """Mark the losses that are called inside as functions, and say where their samples are.

    Args:
        inputs: Accepted for existing code; nothing needs to be said of inputs.
        sample_axis: As in ``extend``, for losses inside.
        documents: The number of the document, or of any other group, of each position of what the losses inside
            take, whole numbers from 0 on, ``[n, t]`` or ``[n * t]``. Groups are the samples, and there is a row
            of results for each number: documents that are packed into rows, graphs of different sizes, pairs.
            Each pass checks that they are kept apart.

    Raises:
        BadInput: If ``sample_axis`` or ``documents`` is no declaration; at the end, if ``documents`` were
            declared and no loss was called inside.
    """
    drop_stale_recording()
    if sample_axis is not None:
        check_sample_axis("record(sample_axis=...) was entered.", sample_axis)
    if documents is not None:
        check_documents(documents)
    if (outer := current.recorder) is not None:
        before = outer.sample_axis, outer.documents
        outer.sample_axis = outer.sample_axis if sample_axis is None else sample_axis
        outer.documents = outer.documents if documents is None else documents
        had_loss, outer.has_loss = outer.has_loss, False
        try:
            yield
            require_loss(outer, documents)
        finally:
            outer.sample_axis, outer.documents = before
            outer.has_loss |= had_loss
        return
    recorder = current.recorder = LossRecorder(None, sample_axis, documents)
    recorder.__enter__()  # type: ignore[no-untyped-call]  # torch's own
    try:
        yield
        require_loss(recorder, documents)
    finally:
        if current.recorder is recorder:
            _stop(recorder)


@contextlib.contextmanager
def disable() -> Iterator[None]:
    """Mark no losses inside, and no outputs of models."""
    before, current.disabled = current.disabled, True
    try:
        yield
    finally:
        current.disabled = before


def is_recording_disabled() -> bool:
    """Whether ``disable()`` is in force."""
    return current.disabled
