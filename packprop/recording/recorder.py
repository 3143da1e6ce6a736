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

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType, MethodWrapperType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from packprop.functions.entry import Call, Expansions, name_of
from packprop.functions.losses.description import LOSSES, input_of
from packprop.functions.registry import RULES, entries_of
from packprop.functions.traits import EXPANSIONS, MIXERS, REORDERINGS
from packprop.recording.inputs import CallTemplate, OffloadedInputs, Source, without_inputs
from packprop.recording.marks import LOSS, MIXES, OUTPUT, USE, ForwardCall, RecordedLoss, RecordedUse, marks_of
from packprop.recording.regions import region_under
from packprop.recording.saved_hooks import Hooks, hooks_in_force, is_checkpoint, is_counted
from packprop.tensors.dry import TensorSpec, is_dry_run
from packprop.tensors.nesting import map_tensors, tensors_in
from packprop.tensors.random import random_states
from packprop.tensors.state import version

IN_PLACE_WITHOUT_INPUT = frozenset({"add_", "sub_", "__iadd__", "__isub__"})


class _Local(threading.local):
    recorder: Recorder | None = None
    disabled: bool = False


thread = _Local()


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
        self.forward = ForwardCall(reference)
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
        self.forward.arguments.append(map_tensors(TensorSpec.of, inputs))
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
        if thread.disabled or thread.recorder is not self:
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
        state = None if func in RULES or is_dry_run() else random_states()
        out = func(*args, **kwargs)
        if state is not None and all(map(torch.equal, state.values(), random_states().values())):
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
        use = RecordedUse(name, entries, edges, shapes, self.forward, source)
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
        return OffloadedInputs(call, in_place)
    region = region_under(hooks)
    return None if region is None else region.place(CallTemplate.of(call, in_place))


def record_loss(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Hang a loss on the node that it made, if its input is part of a graph."""
    given = input_of(function, args, kwargs)
    if not isinstance(given, Tensor) or given.grad_fn is None:
        return
    if isinstance(out, Tensor) and out.grad_fn is not None:
        edge = get_gradient_edge(given)
        call = RecordedLoss(function, args, kwargs, edge, given.shape, version(given))
        marks_of(out.grad_fn)[LOSS] = (call, out.output_nr)
        out.grad_fn.register_prehook(call.release)
