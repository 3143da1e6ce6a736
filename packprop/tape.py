"""Recording: every torch function that consumes a trainable parameter leaves a use on the autograd graph.

The graph is the tape. A use is kept in the ``metadata`` of the node that the function made, so that it is found
again from the loss and dies with the graph; there is no registry and no state on modules.

# NOTE [What depends on the samples]
While a forward pass is recorded, tensors are told apart by where they come from: those computed from the
inputs of the outermost call *depend on the samples*; those computed from parameters and constants alone do not.
A function that takes one of each kind is where a parameter meets the samples: a use. ``mask * weight`` is none,
``x * weight`` is one, although to autograd they look alike when ``x`` needs no gradient.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType, MethodWrapperType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from packprop.errors import BadInput
from packprop.losses import LOSSES, input_of
from packprop.memory import Spec, is_dry, version
from packprop.regions import (
    Hooks,
    Moved,
    Recipe,
    Source,
    hooks_in_force,
    is_checkpoint,
    is_counted,
    region_under,
    replay,
    without_inputs,
)
from packprop.rules import EXPANSIONS, MIXERS, REORDERINGS
from packprop.types import map_tensors, tensors_in
from packprop.uses import RULES, Call, Entry, Expansions, entries_of, name_of, random_state

USE, LOSS, OUTPUT, MIXES = (f"packprop.{mark}" for mark in ("use", "loss", "output", "mixes"))
HANDLES = "_packprop_handles"
IN_PLACE_WITHOUT_INPUT = frozenset({"add_", "sub_", "__iadd__", "__isub__"})


EXTENDED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that ``extend`` was called on: their parameters must not be missed."""


class _Local(threading.local):
    recorder: Recorder | None = None
    disabled: bool = False


_local = _Local()


@dataclass
class Forward:
    """The outermost call that a use was recorded in.

    Args:
        module: The module that was called, or nothing inside ``record()``.
        sizes: Shapes of the tensors that went in.
        leaves: Inputs that are leaves and require gradients: they are data, not parameters.
        reordered: Whether data may have decided on the order of rows.
        arguments: What went in, tensors without their data.
    """

    module: Callable[[], nn.Module | None]
    sizes: list[torch.Size] = field(default_factory=list)
    leaves: list[weakref.ref[Tensor]] = field(default_factory=list)
    reordered: bool = False
    arguments: list[Any] = field(default_factory=list)

    @property
    def has_parameters(self) -> bool:
        """Whether the module that was called has parameters."""
        module = self.module()
        return module is not None and next(module.parameters(), None) is not None


@dataclass(eq=False)
class Use:
    """One call of a torch function that consumed trainable parameters, hung on the node that it made.

    Args:
        name: Name of the function.
        entries: How each parameter enters it; ``None`` once the graph was freed.
        edges: Where the inputs that depend on samples came from.
        shapes: Shapes of its outputs.
        forward: The outermost call that it was recorded in.
        source: Where its inputs are found, if it does not hold them.
    """

    name: str
    entries: list[Entry] | None
    edges: list[GradientEdge]
    shapes: list[torch.Size]
    forward: Forward
    source: Source | None = None
    held: bool = False

    def release(self, _: Any = None) -> None:
        """Drop the inputs when a backward pass frees the graph that they belong to."""
        if not self.held and not graph_is_kept():
            self.drop()

    def drop(self) -> None:
        """Forget the inputs."""
        self.entries = self.source = None


@dataclass(eq=False)
class LossCall:
    """One call of a loss function, hung on the node that it made."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    edge: GradientEdge
    shape: torch.Size
    version: int
    held: bool = False
    released: bool = False

    @property
    def input(self) -> Tensor:
        """The model's output that the loss was given."""
        tensor = input_of(self.function, self.args, self.kwargs)
        assert isinstance(tensor, Tensor)
        return tensor

    def release(self, _: Any = None) -> None:
        """As ``Use.release``."""
        if not self.held and not graph_is_kept():
            self.args, self.kwargs, self.released = (), {}, True


def marks_of(node: Node) -> dict[str, Any]:
    """The dictionary of a node that marks are kept in (typed as a method in torch, and a property)."""
    return cast(dict[str, Any], node.metadata)


def graph_is_kept() -> bool:
    """Whether the running backward pass retains the graph.

    The engine's own answer is private, and stands here alone: no public function says whether what a node saved
    will be freed, and holding inputs any longer than autograd does would double the memory of a loop that still
    holds its last loss.
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


class _TensorSet:
    """Tensors by identity, without keeping them alive."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[Tensor]] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        reference = self._refs.get(id(tensor))
        return reference is not None and reference() is tensor

    def add(self, tensor: Tensor) -> None:
        self._refs[id(tensor)] = weakref.ref(tensor)


class Recorder(TorchFunctionMode):
    """Sees every torch function of one outermost call, and records uses and losses."""

    def __init__(self, module: nn.Module | None, owner: FrameType | None) -> None:
        super().__init__()
        reference = weakref.ref(module) if module is not None else (lambda: None)
        self.forward = Forward(reference)
        self.owner = owner
        self.depth = 0
        self._samples, self._derived = _TensorSet(), _TensorSet()
        self._expansions = Expansions()

    @property
    def stale(self) -> bool:
        """Whether the call that began this recording was left without its closing hook (an interrupt)."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.owner:
            frame = frame.f_back
        return self.owner is not None and frame is None

    def feed(self, inputs: Any) -> None:
        """Take the inputs of a call as data: what is computed from them depends on the samples."""
        self.forward.arguments.append(map_tensors(Spec.of, inputs))
        for tensor in tensors_in(inputs):
            if isinstance(tensor, nn.Parameter) and self._is_own(tensor):
                continue
            self._samples.add(tensor)
            self.forward.sizes.append(tensor.shape)
            if tensor.is_leaf and tensor.requires_grad:
                self.forward.leaves.append(weakref.ref(tensor))

    def _is_own(self, parameter: Tensor) -> bool:
        module = self.forward.module()
        return module is None or any(parameter is own for own in module.parameters())

    def finish(self, outputs: Any) -> None:
        """Mark what the outermost call returned."""
        for tensor in tensors_in(outputs):
            if tensor.grad_fn is not None and tensor in self._samples:
                marks_of(tensor.grad_fn)[OUTPUT] = (self.forward, tensor.output_nr, tensor.shape)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        hooks = hooks_in_force()
        region = None if hooks is None else region_under(hooks)
        if region is not None and is_counted(func, (args, kwargs)):
            region.calls += 1
        if _local.disabled or _local.recorder is not self:
            return func(*args, **kwargs)
        if isinstance(func, MethodWrapperType):  # an attribute: shape, device, T, data, ...
            out = func(*args, **kwargs)
            if isinstance(out, Tensor) and out is not args[0]:
                self._follow(args, out)
            return out
        samples, parameters = self._sort(args, kwargs)
        if samples and parameters and torch.is_grad_enabled():
            return self._record(func, args, kwargs, samples, parameters, hooks)
        out = func(*args, **kwargs)
        if out is None:
            if samples and func is Tensor.__setitem__:
                self._samples.add(args[0])
            elif parameters and func is Tensor.__setitem__:
                self._derived.add(args[0])
            return None
        if not isinstance(out, (Tensor, tuple, list, dict)):
            return out
        if func in LOSSES:
            record_loss(func, args, kwargs, out)
        if samples:
            self._mark(self._samples, out)
            if func in MIXERS and MIXERS[func](*args, **kwargs):
                self._mark_mixing(out)
            if func in REORDERINGS and (len(samples) > 1 or func is not Tensor.__getitem__):
                self.forward.reordered = True
        elif parameters:
            self._mark(self._derived, out)
            if func in EXPANSIONS:
                self._expansions.note(cast(Tensor, out), args[0])
        return out

    def _sort(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Arguments that depend on samples, and trainable ones that do not."""
        samples: list[Tensor] = []
        parameters: list[Tensor] = []
        for tensor in tensors_in((args, kwargs) if kwargs else args):
            if tensor in self._samples:
                samples.append(tensor)
            elif tensor.requires_grad:
                if tensor.is_leaf or tensor in self._derived or not self._comes_from_samples(tensor):
                    if not any(tensor is known for known in parameters):
                        parameters.append(tensor)
                else:
                    self._samples.add(tensor)
                    samples.append(tensor)
        return samples, parameters

    def _comes_from_samples(self, tensor: Tensor) -> bool:
        """Where a tensor that no torch function was seen to make comes from, by its graph."""
        assert tensor.grad_fn is not None
        stack: list[Node] = [tensor.grad_fn]
        seen = set(stack)
        while stack:
            node = stack.pop()
            if USE in marks_of(node):
                return True
            leaf = getattr(node, "variable", None)
            if leaf is not None and leaf in self._samples:
                return True
            for upstream, _ in node.next_functions:
                if upstream is not None and upstream not in seen:
                    seen.add(upstream)
                    stack.append(upstream)
        self._derived.add(tensor)
        return False

    def _follow(self, args: Any, out: Tensor) -> None:
        samples, parameters = self._sort(args, {})
        if samples:
            self._samples.add(out)
        elif parameters:
            self._derived.add(out)

    def _mark(self, kind: _TensorSet, out: Any) -> None:
        if isinstance(out, Tensor):
            kind.add(out)
        else:
            for tensor in tensors_in(out):
                kind.add(tensor)

    def _record(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        samples: list[Tensor],
        parameters: list[Tensor],
        hooks: Hooks | None,
    ) -> Any:
        """Call a function that consumes parameters, and hang a use on the nodes that it makes."""
        edges = [get_gradient_edge(tensor) for tensor in samples if tensor.requires_grad]
        name = name_of(func)
        in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        kept = args
        if in_place and name not in IN_PLACE_WITHOUT_INPUT:
            kept = (args[0].clone(), *args[1:])
        state = None if func in RULES or is_dry() else random_state()
        out = func(*args, **kwargs)
        if state is not None and all(map(torch.equal, state, random_state())):
            state = None
        if out is None:  # an assignment: the graph walk names the parameter that went into it
            self._samples.add(args[0])
            return None
        self._mark(self._samples, out)
        if func in LOSSES:
            record_loss(func, args, kwargs, out)
        if func in MIXERS and MIXERS[func](*args, **kwargs):
            self._mark_mixing(out)
        if in_place and any(args[0] is parameter for parameter in parameters):
            return out  # a tensor made of parameters became one of samples: named by the graph walk
        outputs = [tensor for tensor in tensors_in(out) if tensor.grad_fn is not None]
        if not outputs:
            return out
        call = Call(func, kept, kwargs, tuple(parameters), outputs[0].shape, self._expansions.source, state)
        shapes = [tensor.shape for tensor in outputs]
        entries = entries_of(call)
        source = None if hooks is None else _source(call, in_place, hooks)
        if source is not None:
            entries = without_inputs(entries, source)
        use = Use(name, entries, edges, shapes, self.forward, source)
        for index, tensor in enumerate(outputs):
            node = tensor.grad_fn
            assert node is not None
            marks_of(node).setdefault(USE, []).append((use, index, tensor.output_nr))
            node.register_prehook(use.release)
        return out

    def _mark_mixing(self, out: Any) -> None:
        """Note by name the layer that mixes samples: the module whose forward pass is running."""
        frame: FrameType | None = sys._getframe(1)
        module: Any = None
        while frame is not None and not isinstance(module, nn.Module):
            module = frame.f_locals.get("self")
            frame = frame.f_back
        name = type(module).__name__
        root = self.forward.module()
        if root is not None:
            paths = [path for path, child in root.named_modules() if child is module]
            name = f"{paths[0]!r} ({name})" if paths and paths[0] else name
        for tensor in tensors_in(out):
            if tensor.grad_fn is not None:
                marks_of(tensor.grad_fn)[MIXES] = name


def _source(call: Call, in_place: bool, hooks: Hooks) -> Source | None:
    """Where a use shall find its inputs, given the hooks that autograd's own go through."""
    if not is_checkpoint(hooks):
        return Moved(call, in_place)
    region = region_under(hooks)
    return None if region is None else region.place(Recipe.of(call, in_place))


def record_loss(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Hang a loss on the node that it made, if its input is part of a graph."""
    given = input_of(function, args, kwargs)
    if not isinstance(given, Tensor) or given.grad_fn is None:
        return
    if isinstance(out, Tensor) and out.grad_fn is not None:
        edge = get_gradient_edge(given)
        call = LossCall(function, args, kwargs, edge, given.shape, version(given))
        marks_of(out.grad_fn)[LOSS] = (call, out.output_nr)
        out.grad_fn.register_prehook(call.release)


# Switching recording on and off


def extend(module: nn.Module, use_converter: bool = False, debug: bool = False) -> nn.Module:
    """Prepare a module or a loss, in place, so that its forward passes are recorded; returns it.

    Extending twice changes nothing; ``restore`` takes it back. Nothing about the forward pass changes: the
    module, its parameters, its ``state_dict`` and its outputs stay what they are. Submodules may be called by
    themselves. Survives ``deepcopy`` and pickling.

    Args:
        module: Any module, as its author wrote it, or a loss module.
        use_converter: Accepted for existing code; nothing needs to be converted.
        debug: Accepted for existing code.

    Raises:
        BadInput: If ``module`` is not an instance of ``torch.nn.Module``.
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
    EXTENDED.add(module)
    for child in module.modules():
        if HANDLES not in child.__dict__:
            child.__dict__[HANDLES] = (
                child.register_forward_pre_hook(_begin, with_kwargs=True),
                child.register_forward_hook(_end, with_kwargs=True, always_call=True),
            )
    return module


def restore(module: nn.Module) -> nn.Module:
    """Undo ``extend`` on a module and its submodules; returns it."""
    for child in module.modules():
        EXTENDED.discard(child)
        for handle in child.__dict__.pop(HANDLES, ()):
            handle.remove()
    return module


def is_extended(module: nn.Module) -> bool:
    """Whether forward passes of this module are recorded."""
    return HANDLES in module.__dict__


def _begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    drop_stale_recording()
    if (again := replay()) is not None:
        again.begin()
        return
    recorder = _local.recorder
    if recorder is None:
        if _local.disabled or not torch.is_grad_enabled():
            return
        recorder = _start(module, sys._getframe(1), (args, kwargs))
    elif recorder.depth == 0:  # the outermost module inside record()
        if recorder.owner is None:
            recorder.forward = Forward(weakref.ref(module))
        recorder.feed((args, kwargs))
    recorder.depth += 1


def _end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    if (again := replay()) is not None:
        again.end()
        return
    recorder = _local.recorder
    if recorder is None or recorder.depth == 0:
        return
    recorder.depth -= 1
    if recorder.depth > 0:
        return
    if recorder.owner is not None:
        _stop(recorder)  # first, so that what is asked of the output is not recorded
    if output is not None:
        _record_own_loss(recorder, module, args, kwargs, output)
        recorder.finish(output)


def _record_own_loss(recorder: Recorder, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
    """A module without parameters that turns a model's output into a scalar is a loss of the user's own."""
    if not isinstance(out, Tensor) or out.ndim > 0 or out.grad_fn is None:
        return
    if len(args) + len(kwargs) < 2:
        return
    given = args[0] if args else kwargs.get("input")
    if not isinstance(given, Tensor) or given.grad_fn is None or _leads_to_loss(out, given):
        return
    if next(module.parameters(), None) is None:
        record_loss(_Undisturbed(module), args, kwargs, out)


class _Undisturbed:
    """A loss module that can be evaluated again without being recorded."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.__name__ = type(module).__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with disable():
            return self.module(*args, **kwargs)


def _leads_to_loss(out: Tensor, given: Tensor) -> bool:
    """Whether a recorded loss stands between a loss module's output and its input."""
    assert out.grad_fn is not None
    stack, seen = [out.grad_fn], set()
    while stack:
        node = stack.pop()
        if node in seen or node is given.grad_fn:
            continue
        seen.add(node)
        if LOSS in marks_of(node):
            return True
        stack += [upstream for upstream, _ in node.next_functions if upstream is not None]
    return False


def _start(module: nn.Module | None, owner: FrameType | None, inputs: Any = None) -> Recorder:
    recorder = Recorder(module, owner)
    if inputs is not None:
        recorder.feed(inputs)  # before it sees functions, so that what is asked of them is not recorded
    hooks = hooks_in_force()
    region = None if hooks is None else region_under(hooks)
    if region is not None:
        region.begin()
    recorder.__enter__()  # type: ignore[no-untyped-call]  # torch's own
    _local.recorder = recorder
    return recorder


def _stop(recorder: Recorder) -> None:
    _local.recorder = None
    recorder.owner = None
    recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own


def drop_stale_recording() -> None:
    """End a recording whose call was left by an interrupt, which runs no closing hook."""
    recorder = _local.recorder
    if recorder is not None and recorder.stale:
        _stop(recorder)


@contextlib.contextmanager
def record(*inputs: Any) -> Iterator[None]:
    """Record what happens inside: functions on top of extended modules, and losses called as functions.

    Args:
        inputs: Tensors that carry samples and enter by other ways than as arguments of an extended module.
    """
    drop_stale_recording()
    if (again := replay()) is not None:
        again.begin()
        try:
            yield
        finally:
            again.end()
        return
    if _local.recorder is not None:
        _local.recorder.feed(inputs)
        yield
        return
    recorder = _start(None, None)
    recorder.feed(inputs)
    try:
        yield
    finally:
        _stop(recorder)


@contextlib.contextmanager
def recording(inputs: list[Tensor]) -> Iterator[None]:
    """Record a part of the forward pass that is run again, by itself, whatever else is being recorded."""
    before, disabled = _local.recorder, _local.disabled
    recorder = Recorder(None, None)
    recorder.feed(inputs)
    recorder.depth = 1  # modules in it are none that recording begins at
    _local.recorder, _local.disabled = recorder, False
    try:
        with recorder:
            yield
    finally:
        _local.recorder, _local.disabled = before, disabled


@contextlib.contextmanager
def disable() -> Iterator[None]:
    """Record nothing inside: forward passes cost what they cost without packprop."""
    before, _local.disabled = _local.disabled, True
    try:
        yield
    finally:
        _local.disabled = before


def is_recording_disabled() -> bool:
    """Whether this is inside of ``disable()``."""
    return _local.disabled
