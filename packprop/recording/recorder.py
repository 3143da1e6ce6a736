"""Recording: every torch function that consumes a trainable parameter leaves a use on the autograd graph.

The graph is the tape. A use is kept in the ``metadata`` of the node that the function made, so that it is found
again from the loss and dies with the graph; there is no registry and no state on modules. What counts as a use
is said in NOTE [What depends on the samples].
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType, MethodWrapperType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from packprop.functions.composites import COMPOSITES
from packprop.functions.entry import Call, is_in_place, name_of
from packprop.functions.losses.description import LOSSES, input_of
from packprop.functions.registry import RULES, entries_of
from packprop.functions.traits import (
    CONSTANTS,
    EXPANSIONS,
    LIKE_ANOTHER,
    MIXERS,
    REORDERINGS,
    SEPARATE,
    is_one_index,
)
from packprop.recording.aside import OwnMode, can_look_inside, is_running
from packprop.recording.inputs import CallTemplate, InputSource, OffloadedInputs, without_inputs
from packprop.recording.marks import (
    CHOSEN,
    EXTENDED,
    LOSS,
    MIXES,
    OUTPUT,
    USE,
    ForwardCall,
    RecordedLoss,
    RecordedUse,
    marks_of,
    note_hooks,
)
from packprop.recording.provenance import Expansions, Provenance
from packprop.recording.regions import region_under
from packprop.recording.saved_hooks import Hooks, hooks_in_force, is_checkpoint, is_counted
from packprop.tensors.dry import TensorSpec, is_dry_run
from packprop.tensors.nesting import map_tensors, tensors_in
from packprop.tensors.random import random_states
from packprop.tensors.state import version

IN_PLACE_WITHOUT_INPUT = frozenset({"add_", "sub_", "__iadd__", "__isub__"})
"""In-place functions whose derivative does not depend on the first argument, which they overwrite."""


class _Current(threading.local):
    recorder: Recorder | None = None
    disabled: bool = False


current = _Current()
"""The recorder of this thread, and whether recording is switched off in it."""


class Recorder(OwnMode):
    """Sees every torch function of one outermost call, and records uses and losses.

    Args:
        module: The module that was called; ``None`` inside ``record()``.
        owner: The Python frame of that call, which ends the recording; ``None`` if something else ends it.
    """

    def __init__(self, module: nn.Module | None, owner: FrameType | None) -> None:
        super().__init__()
        self._provenance, self._expansions = Provenance(), Expansions()
        self.begin(module)
        self.owner = owner
        self.depth = 0
        """How many extended modules are being called, one inside the other."""

    def begin(self, module: nn.Module | None) -> None:
        """Begin an outermost call."""
        reference = weakref.ref(module) if module is not None else (lambda: None)
        self.forward = ForwardCall(reference, made=self._provenance.alive)

    @property
    def stale(self) -> bool:
        """Whether the call that began this recording was left without its closing hook (an interrupt)."""
        return self.owner is not None and not is_running(self.owner)

    def open(self, module: nn.Module, inputs: Any) -> None:
        """Begin the call of an outermost module inside ``record()``."""
        if self.owner is None:
            self.begin(module)
        self.feed(inputs)

    def takes(self, module: nn.Module, inputs: Any) -> bool:
        """Whether the inputs of a module that is not recorded depend on the samples."""
        if self.depth == 0:
            self.open(module, inputs)
        return any(tensor in self._provenance.from_samples for tensor in tensors_in(inputs))

    def take_as_data(self, outputs: Any) -> None:
        """Take what a module that is not recorded returned: it depends on the samples."""
        self._provenance.from_samples.add_all(outputs)

    def feed(self, inputs: Any) -> None:
        """Take the inputs of a call as data: what is computed from them depends on the samples."""
        self.forward.arguments.append(map_tensors(TensorSpec.of, inputs))
        is_loss = self.forward.module() is not None and not self.forward.has_parameters
        tensors = list(tensors_in(inputs))
        own = {id(each) for each in tensors if isinstance(each, nn.Parameter) and self._is_own(each)}
        if (
            is_loss
            and own
            and id(tensors[0]) in own
            and not any(t.requires_grad for t in tensors if id(t) not in own)
        ):
            return  # a loss of a parameter and constants, such as a penalty: no sample enters it
        for tensor in tensors:
            if id(tensor) in own:
                continue
            self._provenance.from_samples.add(tensor)
            self.forward.sizes.append(tensor.shape)
            if not is_loss:
                self.forward.inputs.append(weakref.ref(tensor))
            if tensor.is_leaf and tensor.requires_grad:
                self.forward.leaves.append(weakref.ref(tensor))

    def _is_own(self, parameter: Tensor) -> bool:
        """Whether a parameter belongs to the module that was called, if there is one, or to an extended one."""
        module = self.forward.module()
        if module is None:
            return True
        return any(parameter is own for each in (module, *EXTENDED) for own in each.parameters())

    def finish(self, outputs: Any) -> None:
        """Mark what the outermost call returned."""
        for tensor in tensors_in(outputs):
            if tensor.grad_fn is not None and tensor in self._provenance.from_samples:
                marks_of(tensor.grad_fn)[OUTPUT] = (self.forward, tensor.output_nr, tensor.shape)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        if func in COMPOSITES and can_look_inside((args, kwargs)):
            return self.look_inside(func, args, kwargs)
        hooks = hooks_in_force()
        region = None if hooks is None else region_under(hooks)
        if region is not None and is_counted(func, (args, kwargs)):
            region.calls += 1
        if current.disabled or current.recorder is not self:
            return func(*args, **kwargs)
        provenance = self._provenance
        if isinstance(func, MethodWrapperType):  # an attribute: shape, device, T, data, ...
            out = func(*args, **kwargs)
            if isinstance(out, Tensor) and out is not args[0]:
                provenance.follow(args, out)
            return out
        if func in SEPARATE:
            return self._follow_each(func, args, kwargs)
        samples, parameters = provenance.sort(*self._with_entries(func, args, kwargs))
        if samples and parameters and torch.is_grad_enabled():
            return self._record(func, args, kwargs, samples, parameters, hooks)
        out = func(*args, **kwargs)
        if func is Tensor.register_hook:
            note_hooks(args[0])
        if out is None:
            if samples and func is Tensor.__setitem__:
                provenance.from_samples.add(args[0])
                provenance.note_order(func, args, samples, args[0])
            elif parameters and func is Tensor.__setitem__:
                provenance.from_parameters.add(args[0])
            return None
        if not isinstance(out, (Tensor, tuple, list, dict)):
            return out
        if func in LOSSES:
            record_loss(func, args, kwargs, out)
        if samples:
            if func in CONSTANTS and self._is_without_samples(out, samples, args):
                return out
            provenance.from_samples.add_all(out)
            provenance.note_order(func, args, samples, out)
            if func in MIXERS and MIXERS[func](*args, **kwargs):
                _mark_mixing(self.forward.module(), out)
            if func in REORDERINGS and (len(samples) > 1 or func is not Tensor.__getitem__):
                self.forward.reordered = True
        elif parameters:
            provenance.from_parameters.add_all(out)
            self._expansions.note(func, args, out)
            if func is Tensor.__getitem__ and any(t in provenance.from_samples for t in tensors_in(args[1:])):
                _mark_chosen(out)
        return out

    def _follow_each(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function whose outputs come from one input each, which decides what each of them is."""
        out = func(*args, **kwargs)
        for tensor, made in zip(tensors_in(args), tensors_in(out), strict=True):
            if made is not tensor:
                self._provenance.follow((tensor,), made)
        self._expansions.note(func, args, out)
        return out

    def _with_entries(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments without a tensor that is taken for its metadata alone, or for the number of a slice.

        A parameter that is expanded to hold the samples meets them all the same: it may be all there is to use.
        A slice whose number data decided, such as an expert's, is the same for all that meets it later.
        """
        if func is Tensor.__getitem__ and args[0] not in self._provenance.from_samples:
            return (args[:1] if is_one_index(args[1]) else args), kwargs
        if func not in LIKE_ANOTHER:
            return args, kwargs
        if func in EXPANSIONS and self._may_hold_samples([*tensors_in((args, kwargs))][-1].shape):
            return args, kwargs
        return args[:1], {}

    def _is_without_samples(self, out: Any, samples: list[Tensor], args: tuple[Any, ...]) -> bool:
        """Whether a constant that was made like a tensor has no axis that could hold the samples.

        Others count as samples: what a parameter meets there can be told apart by samples.
        """
        alone = len(samples) == 1 and samples[0] is args[0] and not out.requires_grad
        return alone and not self._may_hold_samples(out.shape)

    def _may_hold_samples(self, shape: torch.Size) -> bool:
        """Whether an axis has room for the samples, which are on the leading axis of some input of the call."""
        leading = {size[0] for size in self.forward.sizes if len(size)}
        return not leading or any(extent % samples == 0 for extent in shape for samples in leading if samples)

    def _record(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        samples: list[Tensor],
        parameters: list[Tensor],
        hooks: Hooks | None,
    ) -> Any:
        """Call a function that consumes parameters, and leave a use on the nodes that it makes."""
        name = name_of(func)
        in_place = is_in_place(func)
        origins = [_changed_with(tensor) if in_place and tensor is args[0] else tensor for tensor in samples]
        edges = [get_gradient_edge(tensor) for tensor in origins if tensor.requires_grad]
        inputs = args
        if in_place and name not in IN_PLACE_WITHOUT_INPUT:
            inputs = (args[0].clone(), *args[1:])
        state = None if func in RULES or is_dry_run() else random_states()
        out = func(*args, **kwargs)
        if state is not None and all(map(torch.equal, state.values(), random_states().values())):
            state = None
        if out is None:  # an assignment: the graph walk names the parameter that went into it
            self._provenance.from_samples.add(args[0])
            return None
        self._provenance.from_samples.add_all(out)
        reordered = self._provenance.note_order(func, args, samples, out)
        if func in LOSSES:
            record_loss(func, args, kwargs, out)
        if func in MIXERS and MIXERS[func](*args, **kwargs):
            _mark_mixing(self.forward.module(), out)
        if in_place and any(args[0] is parameter for parameter in parameters):
            return out  # a tensor made of parameters now depends on samples: the graph walk names it
        outputs = [tensor for tensor in tensors_in(out) if tensor.grad_fn is not None]
        if outputs:
            shape, unexpanded = outputs[0].shape, self._expansions.source
            call = Call(func, inputs, kwargs, tuple(parameters), shape, unexpanded, state)
            entries = entries_of(call)
            source = None if hooks is None else _input_source(call, in_place, hooks)
            if source is not None:
                entries = without_inputs(entries, source)
            shapes = [tensor.shape for tensor in outputs]
            use = RecordedUse(name, entries, edges, shapes, self.forward, source, reordered=reordered)
            _leave_use(use, outputs)
        return out


def _changed_with(tensor: Tensor) -> Tensor:
    """The tensor whose history goes on from its own node when this one is changed in place.

    A view gets a new history then, which leads through that of its base: the node that made the view is in no
    graph any more. Which tensor is a view of which has a private name alone.
    """
    base = tensor._base
    return tensor if base is None else base


def _input_source(call: Call, in_place: bool, hooks: Hooks) -> InputSource | None:
    """Where a use shall find its inputs, if the hooks on saved tensors do not let it hold them."""
    if not is_checkpoint(hooks):
        return OffloadedInputs(call, in_place)
    region = region_under(hooks)
    return None if region is None else region.inputs_of_last_call(CallTemplate.of(call, in_place))


def _leave_use(use: RecordedUse, outputs: list[Tensor]) -> None:
    """Leave a use on the nodes that made its outputs."""
    for index, tensor in enumerate(outputs):
        node = tensor.grad_fn
        assert node is not None
        marks_of(node).setdefault(USE, []).append((use, index, tensor.output_nr))
        node.register_prehook(use.release)


def _mark_chosen(part: Any) -> None:
    """Mark a part of a parameter that data chose: it belongs to samples although none enters it."""
    if isinstance(part, Tensor) and part.grad_fn is not None:
        marks_of(part.grad_fn)[CHOSEN] = True


def _mark_mixing(root: nn.Module | None, out: Any) -> None:
    """Mark outputs with the name of the layer that mixed samples: the module whose forward pass is running."""
    frame: FrameType | None = sys._getframe(1)
    module: Any = None
    while frame is not None and not isinstance(module, nn.Module):
        module = frame.f_locals.get("self")
        frame = frame.f_back
    name = type(module).__name__
    if root is not None:
        paths = [path for path, child in root.named_modules() if child is module]
        name = f"{paths[0]!r} ({name})" if paths and paths[0] else name
    for tensor in tensors_in(out):
        if tensor.grad_fn is not None:
            marks_of(tensor.grad_fn)[MIXES] = name


def record_loss(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Leave a loss on the node that it made, if its input is part of a graph."""
    loss_input = input_of(function, args, kwargs)
    if not isinstance(loss_input, Tensor) or loss_input.grad_fn is None:
        return
    if isinstance(out, Tensor) and out.grad_fn is not None:
        edge = get_gradient_edge(loss_input)
        loss = RecordedLoss(function, args, kwargs, edge, loss_input.shape, version(loss_input))
        marks_of(out.grad_fn)[LOSS] = (loss, out.output_nr)
        out.grad_fn.register_prehook(loss.release)
