"""Recording: every torch function that consumes a trainable parameter leaves a use on the autograd graph.

The graph is the tape. A use is kept in the ``metadata`` of the node that the function made, so that it is found
again from the loss and dies with the graph; there is no registry and no state on modules. What counts as a use
is said in NOTE [What depends on the samples].
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from types import FrameType, MethodWrapperType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.utils.rnn import PackedSequence

from packprop.errors import BadInput
from packprop.functions.composites import COMPOSITES
from packprop.functions.entry import Call, Entry, Taken, is_in_place, name_of, plain_options
from packprop.functions.losses.description import LOSSES
from packprop.functions.registry import RULES, can_wait, entries_of
from packprop.functions.reorderings import REORDERINGS, axes_reordered
from packprop.functions.traits import (
    CONSTANTS,
    EXPANSIONS,
    LIKE_ANOTHER,
    MAY_DRAW,
    METADATA,
    MIXERS,
    SEPARATE,
    UNUSUAL,
    is_one_index,
)
from packprop.recording.aside import Nesting, OwnMode, can_look_inside, is_running
from packprop.recording.axes import AXIS
from packprop.recording.inputs import without_inputs
from packprop.recording.leaving import (
    leave_use,
    mark_chosen,
    mark_mixing,
    mark_output,
    mark_reordering,
    record_loss,
)
from packprop.recording.marks import (
    ForwardCall,
    RecordedUse,
    edge_before,
    edge_of,
    note_hooks,
)
from packprop.recording.provenance import Expansions, Provenance, Sorted
from packprop.recording.regions import input_source, region_under
from packprop.recording.saved_hooks import Hooks, hooks_in_force, is_counted
from packprop.tensors.dry import TensorSpec, is_dry_run
from packprop.tensors.nesting import (
    map_instances,
    map_tensors,
    tensors_in,
    tensors_in_objects,
    tensors_of_call,
)
from packprop.tensors.random import random_states, states_if_drawn
from packprop.tensors.traced import is_traced

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
        sample_axis: The axis of what losses take that holds the samples, unless the module declares it.
    """

    def __init__(
        self, module: nn.Module | None, owner: FrameType | None, sample_axis: int | None = None
    ) -> None:
        super().__init__()
        self.sample_axis = sample_axis
        self.documents: Tensor | None = None
        self.has_loss = False
        """Whether a loss was recorded since somebody asked."""
        self._provenance, self._expansions = Provenance(), Expansions()
        self.begin(module)
        self.owner = owner
        self.nesting = Nesting()
        """Calls of extended modules."""

    def begin(self, module: nn.Module | None) -> None:
        """Begin an outermost call."""
        reference = weakref.ref(module) if module is not None else (lambda: None)
        self.forward = ForwardCall(reference, made=self._provenance.alive)
        self._provenance.sizes = self.forward.sizes

    @property
    def stale(self) -> bool:
        """Whether the call that began this recording was left without its closing hook (an interrupt)."""
        return self.owner is not None and not is_running(self.owner)

    def open(self, module: nn.Module, inputs: Any) -> None:
        """Begin the call of an outermost module inside ``record()``."""
        if self.owner is None:
            self.begin(module)
        self.feed(*inputs)

    def takes(self, module: nn.Module, inputs: Any) -> bool:
        """Whether the inputs of a module that is not recorded depend on the samples."""
        if self.nesting.outermost is None:
            self.open(module, inputs)
        return self._is_of_samples(inputs)

    def _is_of_samples(self, value: Any) -> bool:
        """Whether a tensor in there depends on the samples."""
        return any(tensor in self._provenance.from_samples for tensor in tensors_in(value))

    def note_loss(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Leave a loss on the node that it made, with the documents that were declared."""
        self.has_loss = True
        record_loss(function, args, kwargs, out, self.documents)

    def take_as_data(self, outputs: Any) -> None:
        """Take what a module that is not recorded returned: it depends on the samples."""
        self._provenance.from_samples.add_all(outputs)

    def feed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the inputs of a call as data: what is computed from them depends on the samples."""
        inputs, forward = (args, kwargs), self.forward
        forward.arguments.append(map_tensors(TensorSpec.of, inputs))
        module = forward.module()
        is_loss = module is not None and not forward.has_parameters
        tensors = list(tensors_in_objects(inputs))
        declared = vars(module).get(AXIS) if module is not None else None
        forward.declared = self.sample_axis if declared is None else declared
        own = {id(each) for each in tensors if isinstance(each, nn.Parameter) and forward.owns(each)}
        if (
            is_loss
            and own
            and id(tensors[0]) in own
            and not any(t.requires_grad for t in tensors if id(t) not in own)
        ):
            return  # a loss of a parameter and constants, such as a penalty: no sample enters it
        packed: list[PackedSequence] = []
        map_instances(PackedSequence, packed.append, inputs)
        forward.sizes += [torch.Size([int(each.batch_sizes[0])]) for each in packed]  # so many sequences
        inside = {id(tensor) for each in packed for tensor in tensors_in(each)}
        for tensor in tensors:
            if id(tensor) in own:
                continue
            self._provenance.from_samples.add(tensor)
            if id(tensor) in inside:
                forward.reordered = True
                self._provenance.reordered.add(tensor)
            else:
                forward.sizes.append(tensor.shape)
            if not is_loss:
                forward.inputs.append(weakref.ref(tensor))
            if tensor.requires_grad and tensor.is_leaf:
                forward.leaves.append(weakref.ref(tensor))

    def finish(self, outputs: Any) -> None:
        """Mark what the outermost call returned."""
        for tensor in tensors_in(outputs):
            mark_output(self.forward, tensor, tensor in self._provenance.from_samples)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if is_compiling():
            return func(*args, **kwargs)
        if type(func) is MethodWrapperType:  # an attribute: shape, device, T, data, ...
            out = func(*args, **kwargs)
            new = isinstance(out, Tensor) and out is not args[0]
            if new and current.recorder is self and not current.disabled:
                self._provenance.follow(args, out)
            return out
        if func in METADATA:
            return func(*args, **kwargs)
        if func in COMPOSITES and can_look_inside(args, kwargs):
            return self.look_inside(func, args, kwargs)
        hooks = hooks_in_force()
        if hooks is not None:
            region = region_under(hooks)
            if region is not None and is_counted(func, (args, kwargs)):
                region.calls += 1
            if region is not None and func is Tensor.register_hook:
                region.hooks.append(args[1])
        if current.recorder is not self or current.disabled:
            return func(*args, **kwargs)
        tensors = tensors_of_call(args, kwargs)
        unusual = func in UNUSUAL
        if unusual:
            if func in SEPARATE:
                return self._follow_each(func, args, kwargs)
            tensors = self._with_entries(func, args, tensors)
        arguments = samples, parameters, _ = self._provenance.sort(tensors)
        if samples and parameters and torch.is_grad_enabled():
            return self._record(func, args, kwargs, arguments, hooks)
        out = func(*args, **kwargs)
        if unusual and self._is_settled(func, args, kwargs, arguments, out):
            return out
        if isinstance(out, (Tensor, tuple, list, dict)):
            if func in LOSSES:
                self.note_loss(func, args, kwargs, out)
            if samples:
                self._provenance.from_samples.add_all(out)
                if unusual or self._provenance.reordered.references:
                    self._provenance.note_order(func, args, kwargs, samples, out)
            elif parameters:
                self._provenance.from_parameters.add_all(out)
        return out

    def _is_settled(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arguments: Sorted,
        out: Any,
    ) -> bool:
        """Do what an unusual function asks for; whether nothing is left to do about what it returned."""
        samples, parameters, _ = arguments
        if func is Tensor.register_hook:
            note_hooks(args[0])
        elif func is Tensor.__setitem__:
            if samples:
                self._provenance.from_samples.add(args[0])
                self._provenance.note_order(func, args, kwargs, samples, args[0])
                mark_reordering(self.forward, args[0], axes_reordered(func, args, kwargs))
            elif parameters:
                self._provenance.from_parameters.add(args[0])
        elif func is torch.arange:
            self._provenance.counted.add_all(out if len(args) == 1 else ())
        elif not samples:
            if parameters:
                self._expansions.note(func, args, out)
                if func is Tensor.__getitem__ and self._is_of_samples(args[1]):
                    mark_chosen(out)
        elif func in CONSTANTS:
            return self._is_without_samples(out, samples, args)
        elif func in MIXERS:
            if MIXERS[func](*args, **kwargs):
                mark_mixing(self.forward, out)
        elif func in REORDERINGS:
            mark_reordering(self.forward, out, axes_reordered(func, args, kwargs, self._provenance.counted))
        return False

    def _follow_each(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function whose outputs come from one input each, which decides what each of them is."""
        out = func(*args, **kwargs)
        for tensor, made in zip(tensors_in(args), tensors_in(out), strict=True):
            if made is not tensor:
                self._provenance.follow((tensor,), made)
        self._expansions.note(func, args, out)
        return out

    def _with_entries(
        self, func: Callable[..., Any], args: tuple[Any, ...], tensors: list[Tensor]
    ) -> list[Tensor]:
        """The tensors that went in, without one that is taken for its metadata, or for the number of a slice.

        A parameter that is expanded to hold the samples meets them all the same: it may be all there is to use.
        A slice whose number data decided, such as an expert's, is the same for all that meets it later.
        """
        if func is Tensor.__getitem__:
            alone = tensors[0] not in self._provenance.from_samples and is_one_index(args[1])
            return tensors[:1] if alone else tensors
        if func not in LIKE_ANOTHER or (
            func in EXPANSIONS and self._provenance.may_hold_samples(tensors[-1].shape)
        ):
            return tensors
        return tensors[:1]

    def _is_without_samples(self, out: Any, samples: list[Tensor], args: tuple[Any, ...]) -> bool:
        """Whether a constant that was made like a tensor has no axis that could hold the samples.

        Others count as samples: what a parameter meets there can be told apart by samples.
        """
        alone = len(samples) == 1 and samples[0] is args[0] and not out.requires_grad
        return alone and not self._provenance.may_hold_samples(out.shape)

    def _record(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arguments: Sorted,
        hooks: Hooks | None,
    ) -> Any:
        """Call a function that consumes parameters, and leave a use on the nodes that it makes."""
        samples, parameters, constants = arguments
        name, in_place = _name_and_kind(func)
        origins = [each for each in samples if func not in LIKE_ANOTHER or each is args[0]]
        origins = [each for each in origins if each.requires_grad]
        edges = [edge_of(tensor) for tensor in origins]
        inputs = args
        if in_place and name not in IN_PLACE_WITHOUT_INPUT:
            inputs = (args[0].clone(), *args[1:])
        draws = func in MAY_DRAW or func not in RULES
        before = ({} if is_traced() else random_states()) if draws and not is_dry_run() else None
        out = func(*args, **kwargs)
        state = states_if_drawn(before, f"whether {name} draws random numbers")
        if in_place:
            changed = zip(origins, edges, strict=True)
            edges = [edge_before(each, edge) if each is args[0] else edge for each, edge in changed]
        if out is None:  # an assignment: the graph walk names the parameter that went into it
            self._provenance.from_samples.add(args[0])
            return None
        results = [out] if isinstance(out, Tensor) else list(tensors_in(out))
        for tensor in results:
            self._provenance.from_samples.add(tensor)
        reordered = func in REORDERINGS or bool(self._provenance.reordered.references)
        reordered = reordered and self._provenance.note_order(func, args, kwargs, samples, out)
        if func in LOSSES:
            self.note_loss(func, args, kwargs, out)
        if func in MIXERS and MIXERS[func](*args, **kwargs):
            mark_mixing(self.forward, out)
        if in_place and any(args[0] is parameter for parameter in parameters):
            return out  # a tensor made of parameters now depends on samples: the graph walk names it
        outputs = [tensor for tensor in results if tensor.grad_fn is not None]
        if outputs:
            shapes = [tensor.shape for tensor in outputs]
            call = Call(func, inputs, kwargs, tuple(parameters), shapes[0], self._expansions.source, state)
            source = None if hooks is None else input_source(call, in_place, hooks)
            made: list[Entry] | Call = call
            if source is not None:
                made = without_inputs(entries_of(call), source)
            elif in_place or not can_wait(call):
                made = entries_of(call)
            else:
                given = (*samples, *parameters, *constants)
                call.taken = tuple([Taken.of(each) for each in given])
            options = plain_options((args, tuple(kwargs.values())))
            use = RecordedUse(name, made, edges, shapes, self.forward, source, False, reordered, options)
            leave_use(use, outputs)
        return out


@functools.lru_cache(maxsize=1024)
def _name_and_kind(function: Callable[..., Any]) -> tuple[str, bool]:
    """The name of a torch function, and whether it overwrites its first argument."""
    return name_of(function), is_in_place(function)


def require_loss(recorder: Recorder, documents: Tensor | None) -> None:
    """Refuse documents that no loss was told of: arithmetic on the model's output does not know them.

    Raises:
        BadInput: A ``ValueError``.
    """
    if documents is None or recorder.has_loss or current.disabled or not torch.is_grad_enabled():
        return
    raise BadInput(
        "record(documents=...) was left.",
        f"documents of shape {list(documents.shape)}",
        "no loss was called inside that packprop knows, so nothing says what these are the rows of",
        "call a loss function of torch inside; or put the arithmetic into a module without parameters that "
        "takes the model's output and the targets, and extend it: loss = packprop.extend(MyLoss())",
    )
