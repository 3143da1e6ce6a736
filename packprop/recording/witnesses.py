"""Which rows of the first uses belong to which rows of the model's inputs.

# NOTE [Witnesses]
The autograd graph ends at the first uses: inputs need no gradient, so what lies between an input and the first
parameters, and inside the function that takes these, leaves no trace on it. A sweep from the loss can only say
that the samples are apart down to there, on some axis; whether it is the axis of the samples, or one of
positions, it cannot say. So functions of the inputs alone are called a second time, on copies of the inputs in
which half of the rows along an axis are others (*witnesses*), and a third time with the other half. So is a use
whose inputs are such copies. Where its output differs, there are the rows that were changed: a layout of the
samples at this output is right only if all rows of unchanged samples are what they were.

This is done for the axes that were declared; without a declaration for axis 0, and axis 1 of inputs with three
axes. What copies would show is known without any where the first parameters meet the inputs as they are: a
layer keeps some axes, and mixes others. Where no two axes of an input are equally long, no plan counts copies:
small inputs of modules alone are copied (``CHEAP``), until a use has taken them. It is done in the first call
of a module with inputs of given shapes; what was seen is kept by the number of the use in the call. An input is
copied when the first function takes it that could have the samples on another axis than the leading one: a
linear layer on ``[n, f]`` or a convolution on ``[n, c, h, w]`` could not. Nothing is seen where a function
fails on copies, changes tensors that are no copies, or is the user's own, inside a checkpoint with contexts of
its own, which may count what is computed, nor behind more functions than ``LONGEST``; nothing is concluded
there.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from packprop.functions.entry import is_in_place
from packprop.functions.traits import EXPANSIONS, LIKE_ANOTHER, MIXERS, leads_with_samples
from packprop.recording.direct import DirectInputs
from packprop.recording.evidence import Change, Evidence, Touched
from packprop.recording.saved_hooks import hooks_in_force, may_be_counted
from packprop.tensors.nesting import map_tensors, tensors_in, tensors_of_call
from packprop.tensors.precision import is_for_storage
from packprop.tensors.random import RandomStates, random_numbers_from, random_states

MOST = 12
"""The most kinds of witnesses in one call: 3 different extents, 2 axes, 2 halves."""


CHEAP = 2**14
"""Bytes of an input up to which it is copied although no two of its axes are equally long."""


LONGEST = 64
"""How many functions of the inputs alone are called again: a frozen network in front would cost too much."""


MANY = 256
"""How many kinds of inputs are remembered for a module."""


_Seen = dict[Any, list[list[Evidence]]]
"""What was seen at each use of a call, by a key of its inputs."""


_SEEN: dict[int, tuple[weakref.ref[nn.Module], _Seen]] = {}
"""By the identity of the module that was called: a dictionary with weak keys would be asked in each call."""


def _seen_of(module: nn.Module) -> _Seen:
    """What was seen in calls of a module."""
    reference, seen = _SEEN.get(id(module), (None, {}))
    if reference is None or reference() is not module:
        seen, number = {}, id(module)
        _SEEN[number] = weakref.ref(module, lambda _: _SEEN.pop(number, None)), seen
    return seen


@dataclass
class _Copies:
    tensor: weakref.ref[Tensor]
    by_change: dict[Change, Tensor] = field(default_factory=dict)


class Witnesses:
    """The witnesses of one outermost call.

    Args:
        module: The module that was called, if there is one.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._waiting: dict[int, tuple[weakref.ref[Tensor], list[int | None], bool]] = {}
        self._copies: dict[int, _Copies] = {}
        self._changes: set[Change] = set()
        self._key: tuple[Any, ...] = ()
        self._known: list[list[Evidence]] | None = None
        self._seen: list[list[Evidence]] = []
        self._uses = 0
        self._followed = 0
        self._direct = DirectInputs()
        self._briefly = True
        """Whether copies go when a use has taken them: no two axes of an input are equally long."""

    @property
    def are_there(self) -> bool:
        """Whether there are inputs to copy, or copies."""
        return bool(self._copies or self._waiting)

    def begin(self, inputs: Iterable[tuple[Tensor, int | None]], declared: bool) -> None:
        """Note the inputs of a call, unless it is known what copies of them would show.

        Args:
            inputs: The inputs that nothing was computed for yet, each with its declared axis.
            declared: Whether axes were declared.
        """
        inputs = list(inputs)
        pairs = [(tensor, axis) for tensor, axis in inputs if _may_be_copied(tensor)]
        if not declared:
            for tensor, _ in inputs:
                self._direct.add(tensor, _may_be_copied(tensor))
            unclear = [(tensor, axis) for tensor, axis in pairs if _is_ambiguous(tensor)]
            self._briefly &= not unclear
            others = [(tensor, axis) for tensor, axis in pairs if _is_cheap(tensor)]
            pairs = unclear if unclear or self._module is None else others
        else:
            self._briefly = False
        self._key += tuple((tensor.shape, tensor.dtype, axis, declared) for tensor, axis in pairs)
        if self._module is not None:
            self._known = _seen_of(self._module).get((self._key, self._module.training))
            if self._known is not None:
                return
        for tensor, own in pairs:
            axes: list[int | None] = [0, 1] if tensor.dim() > 2 or _is_ambiguous(tensor) else [0]
            self._waiting[id(tensor)] = weakref.ref(tensor), [own] if declared else axes, declared

    def _take_up(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Make copies of the inputs that a function will be given; whether it has arguments with copies."""
        if may_be_counted(hooks_in_force()):
            self.drop()
            return False
        tensors = tensors_of_call(args, kwargs)
        if self._briefly and self._direct.is_known(function, args):
            return False
        for tensor in tensors if self._waiting and not leads_with_samples(function, args) else ():
            reference, axes, declared = self._waiting.pop(id(tensor), (None, [], False))
            for axis in axes if reference is not None and reference() is tensor else ():
                if axis is None or axis >= tensor.dim() or tensor.shape[axis] < 2:
                    continue
                for second in (False, True):
                    self._copy(tensor, axis, Change(None if declared else axis, tensor.shape[axis], second))
        return any(self._of(tensor) for tensor in tensors)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that consumes no parameters, and make witnesses of what it returns."""
        if not self._take_up(function, args, kwargs):
            return function(*args, **kwargs)
        state = random_states()
        out = function(*args, **kwargs)
        self._follow(function, args, kwargs, out, state)
        return out

    def call_use(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Evidence]]:
        """Call a function that consumes parameters: the next use; what is known, or seen, of it."""
        found: list[Evidence] = []
        if self._known is not None:
            out, number = function(*args, **kwargs), self._uses
            self._uses += 1
            found = self._known[number] if number < len(self._known) else []
        else:
            if self.are_there and self._take_up(function, args, kwargs):
                state = random_states()
                out = function(*args, **kwargs)
                found = self._see(function, args, kwargs, out, state)
                if self._briefly and function not in LIKE_ANOTHER:
                    for tensor in tensors_of_call(args, kwargs):
                        self._copies.pop(id(tensor), None)
            else:
                out = function(*args, **kwargs)
            self._seen.append(found)
        return out, found or self._direct.evidence(function, args, out)

    def _copy(self, tensor: Tensor, axis: int, change: Change) -> None:
        """Make a copy of an input, in which some rows are their neighbours' rows, and other numbers."""
        if change not in self._changes and len(self._changes) == MOST:
            return
        self._changes.add(change)
        with torch.no_grad(), contextlib.suppress(RuntimeError):  # some kinds of tensors cannot be changed so
            others = tensor.roll(1, axis)
            if tensor.is_floating_point() or tensor.is_complex():
                others = others * 1.25
            mask = change.rows().to(tensor.device)
            mask = mask.view([-1 if place == axis else 1 for place in range(tensor.dim())])
            self._put(tensor, change, torch.where(mask, others, tensor))

    def _put(self, tensor: Tensor, change: Change, copy: Tensor) -> None:
        known = self._copies.get(id(tensor))
        if known is None or known.tensor() is not tensor:
            number = id(tensor)
            reference = weakref.ref(tensor, lambda _: self._drop(number, reference))
            known = self._copies[number] = _Copies(reference)
        known.by_change[change] = copy

    def _drop(self, number: int, reference: weakref.ref[Tensor]) -> None:
        known = self._copies.get(number)
        if known is not None and known.tensor is reference:
            del self._copies[number]

    def _of(self, tensor: Tensor) -> dict[Change, Tensor]:
        known = self._copies.get(id(tensor))
        return known.by_change if known is not None and known.tensor() is tensor else {}

    def follow(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """Make witnesses of what an attribute of an input is."""
        if self._take_up(function, args, kwargs):
            self._follow(function, args, kwargs, out, None)

    def follow_reshaped(self, tensor: Tensor, out: Any) -> None:
        """Note an input whose axes were made into one."""
        if type(out) is Tensor:
            self._direct.follow(tensor, out)

    def _follow(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        state: RandomStates | None,
    ) -> None:
        """Make witnesses of what a function has made of the inputs alone."""
        made = list(tensors_in(out))
        if any(tensor.requires_grad for tensor in made):
            return
        self._followed += 1
        if self._followed > LONGEST:
            return self.drop()
        given = {id(tensor) for tensor in tensors_in((args, kwargs))}
        for change, others in self._again(function, args, kwargs, state):
            for tensor, other in zip(made, others, strict=False):
                if id(tensor) not in given and other.shape == tensor.shape:
                    self._put(tensor, change, other)

    def _see(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        state: RandomStates | None,
    ) -> list[Evidence]:
        """What witnesses show of a use; one that takes the shape of a tensor has the samples where that has."""
        found, made = [], list(tensors_in(out))
        like = tensors_of_call(args, kwargs)[-1] if function in EXPANSIONS & LIKE_ANOTHER else None
        for change, others in self._again(function, args, kwargs, state):
            inputs = [
                _touched(tensor, copy, change.extent)
                for tensor in tensors_in((args, kwargs))
                if (copy := self._of(tensor).get(change)) is not None
            ]
            pairs = [(tensor, other) for tensor, other in zip(made, others, strict=False) if tensor.grad_fn]
            places = {
                place: _touched(tensor, other, change.extent)
                for place, (tensor, other) in enumerate(pairs)
                if other.shape == tensor.shape
            }
            if like is not None and like.shape == made[0].shape:
                places = dict(enumerate(inputs))
            found.append(Evidence(change, inputs, places))
        return found

    def finish(self) -> None:
        """End the call: keep what was seen, drop the copies."""
        if self._module is not None and self._known is None and self._key:
            for evidence in (each for use in self._seen for each in use):
                for touched in (*evidence.inputs, *evidence.outputs.values()):
                    touched.settle()
            seen = _seen_of(self._module)
            if len(seen) == MANY:
                seen.clear()
            seen[self._key, self._module.training] = self._seen
        self.drop()

    def drop(self) -> None:
        """Drop the copies."""
        self._copies, self._waiting = {}, {}

    def _again(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: RandomStates | None,
    ) -> list[tuple[Change, list[Tensor]]]:
        """Call a function on witnesses, once for each change in its arguments."""
        tensors = list(tensors_in((args, kwargs)))
        changes = dict.fromkeys(change for tensor in tensors for change in self._of(tensor))
        if not changes or not self._may_be_called(function, args, kwargs):
            return []
        found = []
        for change in changes:

            def other(tensor: Tensor, change: Change = change) -> Tensor:
                copy = self._of(tensor).get(change)
                if copy is not None:
                    return copy
                alone = isinstance(tensor, nn.Parameter) or tensor.requires_grad
                return tensor.detach() if alone else tensor.clone()

            random = contextlib.nullcontext() if state is None else random_numbers_from(state)
            try:
                with torch.no_grad(), random:
                    out = function(*map_tensors(other, args), **map_tensors(other, kwargs))
            except Exception:  # it does not take other data: nothing is seen
                if _changes_first(function):
                    self._of(args[0]).pop(change, None)
                continue
            found.append((change, list(tensors_in(out))))
        return found

    def _may_be_called(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether a function can be called again without changing anything but copies."""
        if kwargs.get("out") is not None or (function in MIXERS and MIXERS[function](*args, **kwargs)):
            return False
        if inspect.isfunction(function) and not (function.__module__ or "").startswith("torch"):
            return False
        return not _changes_first(function) or all(self._of(tensor) for tensor in tensors_in(args[:1]))


def _is_ambiguous(tensor: Tensor) -> bool:
    """Whether shapes cannot tell samples on the leading axis from samples on the second one.

    Other inputs are not copied: the first call of a model would take more memory than those after it.
    """
    return tensor.dim() > 1 and tensor.shape[0] == tensor.shape[1]


def _is_cheap(tensor: Tensor) -> bool:
    """Whether copies are so small that no plan need count them; an input of one axis may hold offsets."""
    return tensor.dim() > 1 and tensor.numel() * tensor.element_size() <= CHEAP


def _may_be_copied(tensor: Tensor) -> bool:
    """Whether a tensor is plain data that nothing was computed for."""
    return type(tensor) is Tensor and tensor.is_leaf and tensor.layout is torch.strided and not tensor.is_nested


def _changes_first(function: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument."""
    return is_in_place(function) or function is Tensor.__setitem__


def _touched(tensor: Tensor, other: Tensor, extent: int) -> Touched:
    """Where two tensors differ by more than rounding."""
    with torch.no_grad():
        tensor, other = tensor.detach(), other.detach()
        if tensor.is_floating_point() or tensor.is_complex():
            epsilon = torch.finfo(tensor.dtype).eps
            if is_for_storage(tensor.dtype):
                tensor, other = tensor.float(), other.float()
            apart = (tensor - other).abs()
            scale = torch.maximum(tensor.abs(), other.abs()).nan_to_num(0.0, 0.0, 0.0)
            scale = scale.amax() if scale.numel() else scale.sum()
            differs = apart > epsilon**0.75 * scale
        else:
            differs = tensor != other
        axes = [axis for axis, size in enumerate(tensor.shape) if size and size % extent == 0]
        rows: dict[int, Tensor | list[bool]] = {
            axis: differs.movedim(axis, 0).reshape(tensor.shape[axis], -1).any(1) for axis in axes
        }
        return Touched(tensor.shape, rows)
