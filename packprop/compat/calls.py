"""Calls of modules: their inputs, their outputs, and the gradients at both.

packprop itself watches functions and keeps nothing on modules. Extensions for single modules read
``module.input0``, ``module.output`` and the gradients at both. For them, extended modules keep the tensors of
their last call, but only once such an extension has been defined (``keep_calls``). Programs without such
extensions pay nothing.

# NOTE [One call of a module]
Such extensions expect the tensors on the module, where there is room for one call. The graph node that the call
made holds a mark without tensors. If a pass finds a mark that is not the module's last one, the module has been
called again: the tensors on it belong to another call, or to one of several. packprop refuses such a pass.
Marks do not keep modules alive: a node, its module and the module's output would keep each other alive, and
nothing would free a graph without a backward pass. Only the module that was called last stays alive, so that
you can create a loss module in the line that calls it.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules import loss

from packprop.compat.custom_module.branching import Branch, Parallel
from packprop.compat.custom_module.reduce_tuple import ReduceTuple
from packprop.engine.graph import ReachedUse
from packprop.engine.recording import graph_is_kept, is_recording_disabled, marks_of, nodes_above
from packprop.engine.tensors import tensors_in, version
from packprop.errors import PackpropError

CALL = "packprop.call"
INPUTS_ASKED = "The gradients at the inputs of a module were asked for."
KEPT, HANDLE = "_packprop_kept_call", "_packprop_call_handle"
TRANSPARENT = (nn.Sequential, Branch, Parallel, ReduceTuple, fx.GraphModule)
"""Modules that only pass tensors on: extensions for modules never see them."""

_number = itertools.count()
_keeping = False
_latest: list[nn.Module] = []


def is_loss_class(kind: type[nn.Module]) -> bool:
    """Tell whether a class is one of torch's losses, or derived from one."""
    return any(base.__module__ == loss.__name__ for base in kind.__mro__)


def keep_calls() -> None:
    """Make extended modules keep the inputs and the output of their last call from now on."""
    global _keeping
    _keeping = True


def are_calls_kept() -> bool:
    """Tell whether ``keep_calls`` was called."""
    return _keeping


@dataclass(eq=False)
class ModuleCall:
    """One call of an extended module; the nodes that made its outputs hold it as a mark.

    Args:
        kind: The class of the module.
        shapes: Shapes of its outputs.
        reference: The module.
        order: The number of the call; later calls have larger numbers.
        taken: An attribute that the module itself has, under a name that a tensor of the call needs.
        held: Keep the tensors even if a backward pass frees the graph.
    """

    kind: type[nn.Module]
    shapes: list[torch.Size]
    reference: weakref.ref[nn.Module]
    order: int
    taken: str | None
    held: bool = False

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.kind.__name__

    @property
    def module(self) -> nn.Module | None:
        """The module; ``None`` once it is gone."""
        return self.reference()

    def release(self, _: Any = None) -> None:
        """Forget the tensors when a backward pass frees the graph that they belong to."""
        if not self.held and not graph_is_kept():
            self.drop()

    def drop(self) -> None:
        """Forget the tensors: no pass will need them again."""
        module = self.module
        if module is not None and (kept := module.__dict__.get(KEPT)) is not None and kept.call is self:
            forget_call(module)


@dataclass(eq=False)
class _Kept:
    """A module's last call: its mark, the attributes for its tensors, and the tensors with their versions."""

    call: ModuleCall | None
    names: list[str]
    versions: list[tuple[Tensor, int]]

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the names only: a saved module takes its tensors along, as in BackPACK, but not the call."""
        return _Kept, (None, self.names, [])


def watch_calls(module: nn.Module) -> None:
    """Make a module and its submodules keep their calls once ``keep_calls`` has been called."""
    for child in module.modules():
        if HANDLE not in child.__dict__ and not isinstance(child, TRANSPARENT):
            child.__dict__[HANDLE] = child.register_forward_hook(_keep)


def unwatch_calls(module: nn.Module) -> None:
    """Undo ``watch_calls``."""
    for child in module.modules():
        handle = child.__dict__.pop(HANDLE, None)
        if handle is not None:
            handle.remove()
            forget_call(child)


def forget_call(module: nn.Module) -> None:
    """Drop the tensors that a module keeps from its last call; those of its submodules stay."""
    kept = module.__dict__.pop(KEPT, None)
    for name in kept.names if kept is not None else ():
        module.__dict__.pop(name, None)


def _keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if not _keeping or not torch.is_grad_enabled() or is_recording_disabled():
        return
    forget_call(module)
    outputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
    if not outputs:
        return
    attributes = {f"input{place}": given for place, given in enumerate(args)} | {"output": outputs[0]}
    taken = next((name for name in attributes if hasattr(module, name)), None)
    shapes = [tensor.shape for tensor in outputs]
    call = ModuleCall(type(module), shapes, weakref.ref(module), next(_number), taken)
    if taken is None:
        versions = [(value, version(value)) for value in attributes.values() if isinstance(value, Tensor)]
        module.__dict__.update(attributes, **{KEPT: _Kept(call, list(attributes), versions)})
    for index, tensor in enumerate(outputs):
        node = tensor.grad_fn
        assert node is not None
        marks_of(node).setdefault(CALL, []).append((call, index, tensor.output_nr))
        node.register_prehook(call.release)
    _latest[:] = [module]


def calls_below(roots: Sequence[Tensor]) -> dict[ModuleCall, ReachedUse]:
    """Return every marked call between the roots of a backward pass and the leaves, the last one first."""
    uses: dict[ModuleCall, ReachedUse] = {}
    for node in nodes_above(root.grad_fn for root in roots):
        for call, index, output in marks_of(node).get(CALL, ()):
            use = uses.setdefault(call, ReachedUse(call.name, [], call.shapes, is_end=True))
            use.nodes[index] = (node, output)
    return {call: uses[call] for call in sorted(uses, key=lambda call: -call.order)}


def require_kept(call: ModuleCall) -> nn.Module:
    """Return the module of a call; refuse a call whose tensors are gone, or were changed in place."""
    module = call.module
    kept = None if module is None else module.__dict__.get(KEPT)
    asked, where = f"An extension of your own for {call.name} was to run.", f"a module of type {call.name}"
    if call.taken is not None:
        raise PackpropError(
            asked,
            where,
            f"it has an attribute {call.taken!r} of its own, where extensions look for a tensor of its call",
            "rename the attribute, or ask for an extension of packprop, which looks at functions",
        )
    if module is None or kept is None or kept.call is not call:
        raise PackpropError(
            asked,
            where,
            "it was called again, or more than once in this graph, and keeps the tensors of one call alone",
            "call the module once before backward(), or give each place in the model a module of its own",
        )
    for tensor, before in kept.versions:
        if version(tensor) != before:
            raise PackpropError(
                "A per-sample quantity was asked for.",
                f"an input of the call of {call.name}, of shape {list(tensor.shape)}",
                "it was changed in place after the module had used it",
                "use the out-of-place version of the operation that changes it, or clone it first; call "
                "backward() before an optimizer's step",
            )
    return module


def kept_inputs(module: nn.Module) -> list[Any]:
    """Return the inputs that a module keeps from its last call."""
    kept = vars(module)
    return [kept[name] for name in kept[KEPT].names[:-1]]


def edge_key(tensor: Tensor) -> tuple[Any, int]:
    """Return a key that tells tensors of a graph apart, whatever object holds them."""
    return get_gradient_edge(tensor)[:2]


class InputGradients(Sequence["Tensor | None"]):
    """Gradients of the loss in a module's inputs, as far as they come through this module.

    A pass from the module's output to its inputs computes them on the first access.

    Args:
        call: The call.
        gradients: Gradients at its outputs.
        use: The nodes of its outputs.
    """

    def __init__(self, call: ModuleCall, gradients: Sequence[Tensor | None], use: ReachedUse) -> None:
        self.call, self._gradients, self._use = call, gradients, use

    def __len__(self) -> int:
        return len(kept_inputs(require_kept(self.call)))

    @overload
    def __getitem__(self, place: int) -> Tensor | None: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Tensor | None, ...]: ...

    def __getitem__(self, place: int | slice) -> Tensor | tuple[Tensor | None, ...] | None:
        return self._computed[place]

    @functools.cached_property
    def _computed(self) -> tuple[Tensor | None, ...]:
        module = require_kept(self.call)
        inputs = kept_inputs(module)
        edges = {
            place: get_gradient_edge(given)
            for place, given in enumerate(inputs)
            if isinstance(given, Tensor) and given.requires_grad
        }
        reached = [place for place, gradient in enumerate(self._gradients) if gradient is not None]
        if len(reached) > 1:  # one output may have been computed from another
            raise PackpropError(
                INPUTS_ASKED,
                f"a module of type {self.call.name}",
                f"the loss depends on {len(reached)} of its outputs, whose shares cannot be told apart",
                "let the loss depend on one of them, or do without g_inp",
            )
        if len({edge[:2] for edge in edges.values()}) < len(edges):
            raise PackpropError(
                INPUTS_ASKED,
                f"a module of type {self.call.name}",
                "one tensor enters it more than once, so that its gradients cannot be told apart",
                "pass a clone of the tensor for each input",
            )
        # an input may have been computed from another one: no gradient may flow on through it
        stops = [edge.node.register_prehook(_stop) for edge in edges.values()] if len(edges) > 1 else []
        gradients: Sequence[Tensor | None] = ()
        try:
            if edges:
                gradients = torch.autograd.grad(
                    [GradientEdge(*self._use.nodes[place]) for place in reached],
                    list(edges.values()),
                    [self._gradients[place] for place in reached],
                    retain_graph=True,
                    create_graph=torch.is_grad_enabled(),
                    allow_unused=True,
                )
        finally:
            for stop in stops:
                stop.remove()
        by_place = dict(zip(edges, gradients, strict=True))
        return tuple(by_place.get(place) for place in range(len(inputs)))


def _stop(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)
