"""Switching recording on and off: ``extend``, ``record``, ``disable``."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.module import _global_backward_hooks

from packprop.errors import BadInput, PackpropWarning
from packprop.recording import aside
from packprop.recording.axes import AXIS, check_documents, check_sample_axis
from packprop.recording.compiled import is_compiled, is_traced_over, note_compiled, warn_of_compiled
from packprop.recording.marks import EXTENDED, HANDLES, HOOKED, LOSS, Handles, marks_of, nodes_above
from packprop.recording.recorder import Recorder, current, require_loss
from packprop.recording.regions import current_replay, region_under
from packprop.recording.saved_hooks import hooks_in_force
from packprop.tensors.nesting import tensors_in

# What goes in comes out, and a type checker knows it for what it is.
Module = TypeVar("Module", bound=nn.Module)


def extend(
    module: Module,
    use_converter: bool = False,
    debug: bool = False,
    sample_axis: int | None = None,
) -> Module:
    """Prepare a module or a loss, in place, so that its forward passes are recorded; returns it.

    Extending twice changes nothing; ``restore`` undoes it. The forward pass does not change: the module, its
    parameters, its ``state_dict`` and its outputs stay what they are. Submodules may be called by themselves. A
    copy (``deepcopy``, pickle) is extended, too.

    PyTorch's attention in evaluation mode has kernels of its own where nothing is differentiated. What it
    chooses for a frozen encoder is not changed; but an encoder layer does not take its one kernel where there
    are hooks on it, such as packprop's: its outputs are then the same up to rounding. A frozen encoder that is
    called inside ``with backpack(...)`` must be extended, too. One whose own weights are frozen and that holds
    other parameters that are trained (adapters) is recorded, by PyTorch's slow path.

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
    for child in module.modules():
        if isinstance(child, torch.jit.ScriptModule):  # takes no hooks, and calls no torch function
            continue
        if HANDLES not in child.__dict__:
            chooses = isinstance(child, aside.CHOOSERS) or is_compiled(child)
            begin = _begin_choosing if chooses else _begin
            handle = child.register_forward_pre_hook(begin, with_kwargs=True)
            child.__dict__[HANDLES] = Handles(child, [handle])
            if chooses or child is module:
                _watch_end(child)
    return module


def restore(module: Module) -> Module:
    """Undo ``extend`` on a module and its submodules; returns it."""
    for child in module.modules():
        EXTENDED.discard(child)
        child.__dict__.pop(AXIS, None)
        for handle in child.__dict__.pop(HANDLES, ()):
            handle.remove()
    return module


@contextlib.contextmanager
def extended(model: nn.Module) -> Iterator[None]:
    """Extend a model inside, and leave its modules as they were."""
    extended_before = [module for module in model.modules() if is_extended(module)]
    others = [module for module in model.modules() if not is_extended(module)]
    extend(model)
    try:
        yield
    finally:
        for module in others:
            restore(module)
        for module in extended_before:  # restoring a module restores those in it
            if not is_extended(module):
                extend(module)


def is_extended(module: nn.Module) -> bool:
    """Whether forward passes of this module are recorded."""
    return HANDLES in module.__dict__


def _watch_end(module: nn.Module) -> None:
    """From now on, be told when a call of an extended module ends: most are only called inside others.

    The list of handles is shared with copies of the module that share its hooks.
    """
    handles = module.__dict__.get(HANDLES, ())
    if len(handles) == 1:
        handles.append(module.register_forward_hook(_end, with_kwargs=True, always_call=True))


def _begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # torch.jit.script compiles hooks, and cannot compile this one: call packprop.restore(model) before
    if (compiles := is_compiling()) or is_traced_over():
        if compiles:
            note_compiled()
        return
    if module._backward_hooks or _global_backward_hooks:
        _watch_end(module)
    recorder = current.recorder
    if (
        recorder is None
        or recorder.nesting.outermost is None
        or recorder.nesting.outermost is module
        or aside.current.absence is not None
        or current_replay() is not None
        or (recorder.owner is not None and not aside.is_running(recorder.owner, module))
    ):
        _begin_outermost(module, (args, kwargs), sys._getframe(1))


def _begin_choosing(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``_begin``, for a module that packprop's modes may have to be off for."""
    # torch.jit.script compiles hooks, and cannot compile this one: call packprop.restore(model) before
    if (compiles := is_compiling()) or is_traced_over():
        if compiles:
            note_compiled()
        return
    drop_stale_recording()
    if aside.current.absence is not None or not (
        is_compiled(module) or aside.chooses_freely(module, (args, kwargs))
    ):
        _begin_outermost(module, (args, kwargs), sys._getframe(1))
        return
    recorder = current.recorder
    for child in module.modules():
        _watch_end(child)
    from_samples = recorder is not None and recorder.takes(module, (args, kwargs))
    aside.step_aside(module, sys._getframe(1), from_samples)


def _begin_outermost(module: nn.Module, inputs: Any, owner: FrameType) -> None:
    """Begin a call that may be the outermost one."""
    warn_of_compiled()
    drop_stale_recording()
    if (absence := aside.current.absence) is not None:
        absence.nesting.enter(module)
        return
    recorder = current.recorder
    if (replay := current_replay()) is not None:
        _watch_end(module)
        replay.begin(module)
        return
    if recorder is None:
        if current.disabled or not torch.is_grad_enabled():
            return
        if _are_shapeless(inputs):
            warnings.warn(NESTED, PackpropWarning, stacklevel=4)
            return
        recorder = _start(module, owner, inputs)
    elif recorder.nesting.outermost is None:  # the outermost module inside record()
        recorder.open(module, inputs)
    if recorder.nesting.enter(module):
        _watch_end(module)


NESTED = (
    "A nested tensor of the strided layout went into an extended module. It has no shape, so this call is not "
    "recorded, and no backward pass through it computes more than gradients. Pad the rows to one length, and "
    "take what was padded out of the loss."
)


def _are_shapeless(inputs: Any) -> bool:
    return any(tensor.is_nested and tensor.layout == torch.strided for tensor in tensors_in(inputs))


def _end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    if is_compiling() or is_traced_over():
        return
    if module._backward_hooks or _global_backward_hooks:
        _mark_hooked(output)
    recorder = current.recorder
    # torch.jit.script compiles hooks, and cannot compile this one: call packprop.restore(model) before
    if (absence := aside.current.absence) is not None:
        if recorder is not None and absence.from_samples:
            recorder.take_as_data(output)
        if absence.nesting.leave(module):
            aside.step_back()
        return
    if (replay := current_replay()) is not None:
        replay.end(module)
        return
    if recorder is None or not recorder.nesting.leave(module):
        return
    if recorder.owner is not None:
        _stop(recorder)  # first, so that reading the output is not recorded
    if output is not None:
        _record_own_loss(recorder, module, args, kwargs, output)
        recorder.finish(output)


def _mark_hooked(output: Any) -> None:
    """Mark the nodes that made a module's outputs: hooks of the older kind are put on one of them.

    ``Module._backward_hooks`` and ``_global_backward_hooks`` are private, and used here alone: nothing public
    tells that ``register_backward_hook`` was called. Full backward hooks have nodes of their own.
    """
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            marks_of(tensor.grad_fn)[HOOKED] = True


def _record_own_loss(recorder: Recorder, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
    """Record a user's own loss: a module without parameters that turns a model's output into a scalar."""
    if not isinstance(out, Tensor) or out.ndim > 0 or out.grad_fn is None:
        return
    if len(args) + len(kwargs) < 2:
        return
    loss_input = args[0] if args else kwargs.get("input")
    if not isinstance(loss_input, Tensor) or loss_input.grad_fn is None or _has_loss(out, loss_input):
        return
    if next(module.parameters(), None) is None:
        recorder.note_loss(_UnrecordedLoss(module), args, kwargs, out)


class _UnrecordedLoss:
    """A loss module that can be evaluated again without being recorded; equal for every call of the module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
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


def _start(
    module: nn.Module | None,
    owner: FrameType | None,
    inputs: Any = None,
    sample_axis: int | None = None,
) -> Recorder:
    recorder = Recorder(module, owner, sample_axis)
    if inputs is not None:
        recorder.feed(*inputs)  # before it sees functions, so that reading the inputs is not recorded
    hooks = hooks_in_force()
    region = None if hooks is None else region_under(hooks)
    if region is not None:
        region.begin_recording()
    recorder.__enter__()  # type: ignore[no-untyped-call]  # torch's own
    current.recorder = recorder
    return recorder


def _stop(recorder: Recorder) -> None:
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
    """Record what happens inside: functions on top of extended modules, and losses called as functions.

    Args:
        inputs: Tensors that hold samples and do not enter as arguments of an extended module.
        sample_axis: As in ``extend``, for modules and losses inside that declare nothing themselves.
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
    if (replay := current_replay()) is not None:
        block = object()
        replay.begin(block)
        try:
            yield
        finally:
            replay.end(block)
        return
    if (outer := current.recorder) is not None:
        before = outer.sample_axis, outer.documents
        outer.sample_axis = outer.sample_axis if sample_axis is None else sample_axis
        outer.documents = outer.documents if documents is None else documents
        outer.feed(inputs, {})
        had_loss, outer.has_loss = outer.has_loss, False
        try:
            yield
            require_loss(outer, documents)
        finally:
            outer.sample_axis, outer.documents = before
            outer.has_loss |= had_loss
        return
    recorder = _start(None, None, (inputs, {}), sample_axis)
    recorder.documents = documents
    try:
        yield
        require_loss(recorder, documents)
    finally:
        _stop(recorder)


@contextlib.contextmanager
def recording(inputs: list[Tensor]) -> Iterator[None]:
    """Record a part of the forward pass that is run again, apart from what else is being recorded."""
    before, disabled = current.recorder, current.disabled
    recorder = Recorder(None, None)
    recorder.feed((inputs,), {})
    recorder.nesting.enter(recorder)  # no module inside begins a recording of its own
    current.recorder, current.disabled = recorder, False
    try:
        with recorder:
            yield
    finally:
        current.recorder, current.disabled = before, disabled


@contextlib.contextmanager
def disable() -> Iterator[None]:
    """Record nothing inside: forward passes cost what they cost without packprop."""
    before, current.disabled = current.disabled, True
    try:
        yield
    finally:
        current.disabled = before


def is_recording_disabled() -> bool:
    """Whether ``disable()`` is in force."""
    return current.disabled
