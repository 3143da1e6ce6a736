"""Switching recording on and off: ``extend``, ``record``, ``disable``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from packprop.engine.functions.losses.read import leaves_its_node
from packprop.engine.recording.marks import (
    AXIS,
    EXTENDED,
    HANDLES,
    LOSS,
    TOLD,
    Handles,
    Walks,
    marks_of,
    nodes_above,
)
from packprop.engine.recording.recorder import (
    CHOOSERS,
    LossRecorder,
    current,
    mark_outputs,
    step_aside,
    step_back,
    unseen,
)
from packprop.engine.recording.unrecorded import note_compiled
from packprop.engine.tensors.nesting import tensors_of_call
from packprop.errors import BadInput, PackpropError

# `extend` returns its argument, and a type checker keeps its class.
Module = TypeVar("Module", bound=nn.Module)


def extend(
    module: Module,
    use_converter: bool = False,
    debug: bool = False,
    sample_axis: int | None = None,
) -> Module:
    """Prepare a model or a loss for ``backpack``, in place; return it.

    An extended model tells packprop the names of its parameters, the axis of the samples, and where in the
    graph the model ends. An extended loss module keeps its arguments until the backward pass, unless autograd
    does. The forward pass does not change: the module, its parameters, its ``state_dict`` and its outputs stay
    what they are. You may call submodules alone. A copy (``deepcopy``, pickle) is also extended. Extending
    twice changes nothing; ``restore`` undoes it.

    You need not extend a model if a loss function of torch or an extended loss shows where the model ends.
    Errors then do not name its parameters, and the samples are rows along axis 0.

    An encoder layer of PyTorch in evaluation mode does not take its fused kernel if a module in it has hooks,
    such as packprop's. Its outputs are then the same up to rounding.

    Args:
        module: Any module, as its author wrote it, or a loss module.
        use_converter: Accepted for existing code; nothing needs to be converted.
        debug: Accepted for existing code.
        sample_axis: The axis of the loss's input that holds the samples, 0 if you leave it out: 1 for a
            model that returns ``[t, n, c]``. If you flatten positions in front of the loss, it is the axis of
            the tensor that you flatten. The model's inputs play no part. The declaration holds for calls of
            this module, not of its children.

    Raises:
        BadInput: If ``module`` is not an instance of ``torch.nn.Module``, ``sample_axis`` is not an ``int``, or
            ``use_converter`` or ``debug`` is not a ``bool``, such as a second module.
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
                "it must be True or False; one call extends one module",
                "extend(model); extend(loss)",
            )
    if sample_axis is not None:
        _check_sample_axis("extend(module, sample_axis=...) was called.", sample_axis)
        module.__dict__[AXIS] = sample_axis
    EXTENDED.number(module)
    return put_hooks(module)


def put_hooks(module: Module) -> Module:
    """Put packprop's hooks on a module, which does not count as extended by the user; return it."""
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
        module.__dict__[SCRIPTED] = _refuse_scripting
    for child in module.modules():
        if isinstance(child, CHOOSERS) and CHOOSING not in child.__dict__:
            child.__dict__[CHOOSING] = [
                child.register_forward_pre_hook(step_aside, with_kwargs=True),
                child.register_forward_hook(step_back, always_call=True),
            ]
            child.__dict__[SCRIPTED] = _refuse_scripting
    return module


CHOOSING = "_packprop_choosing"
"""Attribute of an attention module: the handles of hooks that switch packprop's modes off in its calls."""

SCRIPTED = "__prepare_scriptable__"
"""Attribute of a module with such hooks: ``torch.jit.script``, which cannot compile them, calls it first."""


def _refuse_scripting() -> None:
    raise PackpropError(
        "torch.jit.script(...) was called.",
        "a module that packprop.extend was called on, or one inside it",
        "it compiles the hooks of a module, and cannot compile those of packprop",
        "call packprop.restore(module) first; you may call packprop.extend(module) afterwards",
    )


def restore(module: Module) -> Module:
    """Undo ``extend`` on a module and its submodules; return it."""
    for child in module.modules():
        EXTENDED.discard(child)
        child.__dict__.pop(AXIS, None)
        _remove_hooks(child, HANDLES, CHOOSING)
    return module


def _remove_hooks(module: nn.Module, *names: str) -> None:
    """Remove the hooks whose handles a module keeps under these names."""
    for name in names:
        for handle in module.__dict__.pop(name, ()):
            handle.remove()
    if module.__dict__.keys().isdisjoint((HANDLES, CHOOSING)):
        module.__dict__.pop(SCRIPTED, None)


@contextlib.contextmanager
def extended(*models: Any, walks: Walks | None = None) -> Iterator[None]:
    """Extend models and loss modules inside the context, and restore them afterwards; ignore anything else.

    ``walks`` holds the walks that passes keep for later ones, for a caller that extends one model many times.
    """
    with contextlib.ExitStack() as stack:
        for model in models:
            if isinstance(model, nn.Module):
                stack.enter_context(_extended(model, walks))
        yield


@contextlib.contextmanager
def _extended(model: nn.Module, walks: Walks | None) -> Iterator[None]:
    added = [
        (child, name) for child in model.modules() for name in (HANDLES, CHOOSING) if name not in vars(child)
    ]
    was_extended = model in EXTENDED
    put_hooks(model)
    if walks is not None and (model, HANDLES) in added:
        vars(model)[HANDLES].walks = walks
    try:
        yield
    finally:
        for child, name in added:
            _remove_hooks(child, name)
        if not was_extended:
            EXTENDED.discard(model)


def is_extended(module: nn.Module) -> bool:
    """Tell whether a module has the hooks of ``extend``."""
    return HANDLES in module.__dict__


def _is_left_alone() -> bool:
    """Tell whether to mark nothing: under ``disable``, without gradients, while a compiler or tracer runs."""
    compiles = is_compiling()
    if compiles or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]  # torch's own
        if compiles:
            note_compiled()
        return True
    return current.disabled or not torch.is_grad_enabled()


def _mark_outputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if _is_left_alone():
        return
    axis, recorder = module.__dict__.get(AXIS), current.recorder
    if recorder is not None and recorder.module is None:
        recorder.has_output = True
        axis = recorder.sample_axis if axis is None else axis
    with unseen():
        mark_outputs(module, axis, args, kwargs, output)


def _begin_loss(module: nn.Module, args: tuple[Any, ...]) -> None:
    if _is_left_alone():
        return
    _drop_stale_recording()
    axis = module.__dict__.get(AXIS)
    if axis is None:  # else it holds for this call alone, whatever is declared around it
        with unseen():
            if current.recorder is not None or leaves_its_node(module, args):
                return
    LossRecorder(sys._getframe(1), axis, module=module).start()


def _end_loss(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    recorder = current.recorder
    if recorder is None or _is_left_alone():
        return
    if output is not None:
        with unseen():
            _record_own_loss(recorder, module, args, kwargs, output)
    if recorder.module is not module:  # a loss inside the one that started it
        return
    recorder.stop()
    if AXIS in module.__dict__ and not recorder.has_loss:
        _require_no_graph(module, output)


def _require_no_graph(module: nn.Module, output: Any) -> None:
    """Refuse the declared axis of a loss that packprop does not know, if its output can be differentiated."""
    found = tensors_of_call((output,), {}, as_far_as_readable=True)
    if any(tensor.grad_fn is not None for tensor in found):
        raise BadInput(
            f"{type(module).__name__}, extended with sample_axis={module.__dict__[AXIS]}, was called.",
            f"its output, of type {type(output).__name__}",
            "a loss of your own takes two tensors and returns one number; for any other module the axis would "
            "have no effect",
            "let it take the model's output and the targets, and return their sum or mean; or declare the axis "
            "of the model: packprop.extend(model, sample_axis=...)",
        )


def _record_own_loss(recorder: LossRecorder, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
    """Record a user's own loss: a module without parameters that turns a model's output into a scalar."""
    if not isinstance(out, Tensor) or out.ndim > 0 or out.grad_fn is None:
        return
    if len(args) + len(kwargs) < 2:
        return
    loss_input = args[0] if args else kwargs.get("input")
    if not isinstance(loss_input, Tensor) or loss_input.grad_fn is None or _has_loss(out, loss_input):
        return
    recorder.note(OwnLoss(module), args, kwargs, out)


class OwnLoss:
    """A loss module, as the function of a recorded loss; equal for every call of the module."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.module_class = module, type(module)
        self.reduction = getattr(module, "reduction", None)
        self.__name__ = type(module).__name__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnLoss) and other.module is self.module

    def __hash__(self) -> int:
        return hash(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module unrecorded."""
        with disable():
            return self.module(*args, **kwargs)


def _has_loss(out: Tensor, loss_input: Tensor) -> bool:
    """Tell whether there is a recorded loss between a loss module's output and its input."""
    assert out.grad_fn is not None
    if out.grad_fn is loss_input.grad_fn:
        return False
    between = nodes_above([out.grad_fn], [loss_input.grad_fn])
    return any(LOSS in marks or TOLD in marks for marks in map(marks_of, between))


def _drop_stale_recording() -> None:
    while current.recorder is not None and current.recorder.is_stale:
        current.recorder.stop()


@contextlib.contextmanager
def record(*inputs: Any, sample_axis: int | None = None, documents: Tensor | None = None) -> Iterator[None]:
    """Mark the losses that you call as functions inside the context, and declare where their samples are.

    Args:
        inputs: Accepted for existing code, and ignored.
        sample_axis: As in ``extend``, for losses inside, and for extended models that are called inside.
        documents: The number of the document, or of any other group, at each position of the losses' inputs:
            whole numbers from 0 on, ``[n, t]`` or ``[n * t]``. Groups are the samples, and there is a row of
            results for each number: documents that are packed into rows, graphs of different sizes, pairs.
            Each pass checks that groups stay apart.

    Raises:
        BadInput: If ``sample_axis`` is not an ``int``, or ``documents`` is not a tensor of whole numbers with
            one or two axes; on exit, if you called no loss inside, but declared ``documents``, or
            ``sample_axis`` without an extended model inside.
    """
    _drop_stale_recording()
    if sample_axis is not None:
        _check_sample_axis("record(sample_axis=...) was entered.", sample_axis)
    if documents is not None:
        _check_documents(documents)
    recorder = LossRecorder(None, sample_axis, documents).start()
    try:
        yield
        is_marked = torch.is_grad_enabled() and not current.disabled
        if sample_axis is not None and is_marked and not (recorder.has_loss or recorder.has_output):
            raise BadInput(
                "record(sample_axis=...) was left.",
                f"sample_axis={sample_axis}",
                "neither a loss that packprop knows nor an extended model was called inside",
                "call the loss function of torch inside; or, for a loss in arithmetic of your own, declare the "
                "axis of the model: packprop.extend(model, sample_axis=...)",
            )
        if documents is not None and is_marked and not recorder.has_loss:
            raise BadInput(
                "record(documents=...) was left.",
                f"documents of shape {list(documents.shape)}",
                "they number the rows of a loss's input, and no loss that packprop knows was called inside",
                "call a loss function of torch with one input inside (not one of pairs); or put the arithmetic "
                "into a module without parameters that takes the model's output and the targets, and extend "
                "it: loss = packprop.extend(MyLoss())",
            )
    finally:
        recorder.stop()


def _check_sample_axis(asked: str, declared: Any) -> None:
    """Refuse a declared axis that is not an ``int``."""
    if type(declared) is not int:
        raise BadInput(
            asked,
            f"sample_axis={declared!r}",
            "it is no axis: declare one whole number for the loss's input, not one for each argument of the "
            "model",
            "give the axis of the loss's input that holds the samples (1 for [t, n, c]), or leave it out for 0",
        )


def _check_documents(declared: Any) -> None:
    """Refuse declared documents that are not a tensor of whole numbers with one or two axes."""
    what = type(declared).__name__
    if isinstance(declared, Tensor):
        whole = declared.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
        if whole and 1 <= declared.dim() <= 2 and declared.numel():
            return
        what = f"of shape {list(declared.shape)} and {declared.dtype}"
    raise BadInput(
        "record(documents=...) was entered.",
        f"documents, {what}",
        "it is no tensor of whole numbers [n, t] or [n * t]",
        "give the number of the document at each position of the loss, from 0 on",
    )


@contextlib.contextmanager
def disable() -> Iterator[None]:
    """Mark no losses and no outputs of models inside the context."""
    before, current.disabled = current.disabled, True
    try:
        yield
    finally:
        current.disabled = before


def is_recording_disabled() -> bool:
    """Tell whether ``disable()`` is in force."""
    return current.disabled


def declared_around() -> tuple[int | None, bool]:
    """Return the sample axis that the surrounding ``record()`` declares, and whether it declares documents."""
    recorder = current.recorder
    if recorder is None:
        return None, False
    recorder.has_output = True  # a replay calls neither a model nor a loss
    return recorder.sample_axis, recorder.documents is not None
