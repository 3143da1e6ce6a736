"""A node of the autograd graph that a parameter enters: its inputs, and calls of the node by itself.

# NOTE [Nodes as functions]
A node is the derivative of one function, and holds the saved tensors that it needs. You can call it by itself
on cotangents. It then returns the gradients of its own inputs, independently of the rest of the graph. This
keeps the uses of a parameter apart if it is used twice, or again further up. The node returns the gradients of
its formula, before autograd sums them over the axes along which a parameter was broadcast, so packprop can take
the part of one sample before the sum. During a pass that is restricted to some leaves, a node computes only
gradients of inputs that lead to these leaves. A sweep that calls nodes must therefore also go to their
parameters.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from packprop.engine.functions.nodes import RESHAPES, has_option, made_by, name_of_node, saved_option
from packprop.engine.functions.operands import facts_of, is_sparse
from packprop.engine.functions.saved import keeps_elsewhere, saved_again, saved_tensor
from packprop.engine.functions.verdicts import Verdicts
from packprop.engine.tensors.dry import is_dry_run
from packprop.engine.tensors.random import Draws
from packprop.engine.tensors.traced import is_traced
from packprop.errors import PackpropError

PROBES = 8
"""The most random cotangents that packprop tries a vectorised call on."""

_VECTORISED = Verdicts()
"""Verdicts on vectorised calls of nodes, by the form of the call.

PyTorch's batching rules of some functions are wrong, so packprop first compares them with single calls.
"""

Form = Literal["entries", "shape", "shape or transpose"]
"""The requirement of a rule on a leaf: the entries of the node's input, its shape, or its shape transposed."""


class NodeSlot:
    """A place for a node: a kept walk (``graph/kept_walk.py``) inserts the node of each pass, then ``None``.

    ``slots`` gets the slots of all nodes that the entries of a use read.
    """

    __slots__ = ("_slots", "node")

    def __init__(self, node: Any, slots: list[NodeSlot] | None = None) -> None:
        self.node, self._slots = node, slots
        if slots is not None:
            slots.append(self)

    def beside(self, node: Any) -> NodeSlot:
        """Return the slot of another node that the same entries read."""
        return NodeSlot(node, self._slots)


@dataclass(frozen=True, eq=False)
class Computed:
    """A tensor that was computed from parameters alone, given by the place where a node takes it."""

    slot: NodeSlot
    place: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def edge(self) -> GradientEdge:
        """The edge of the tensor."""
        return GradientEdge(*self.slot.node.next_functions[self.place])

    @property
    def grad_fn(self) -> Node:
        """The node that made the tensor."""
        return self.edge.node

    def numel(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    def dim(self) -> int:
        """Number of axes."""
        return len(self.shape)


@dataclass(frozen=True)
class Operand:
    """A parameter as an input of a node, where it has ``shape``; the node may take the transpose of the leaf.

    ``tensor`` is the leaf if only its shape or its type changed on the way, else a ``Computed``.
    """

    tensor: Any
    shape: torch.Size
    is_transposed: bool = False


def operand_at(slot: NodeSlot, place: int, form: Form = "entries") -> Operand:
    """Return the operand at a place of a node, traced back to the leaf if only the leaf's form changed."""
    above, number = slot.node.next_functions[place]
    made = made_by(above)[number]
    shape, transposed = torch.Size(made.shape), False
    while (leaf := getattr(above, "variable", None)) is None:
        name = name_of_node(above)
        before = above.next_functions[0][0] if above.next_functions else None
        turns = form == "shape or transpose" and is_transpose(above) and not transposed
        if before is None or not (turns or name in RESHAPES or name == "ToCopy"):
            break
        if turns and torch.Size(made_by(above)[0].shape) != shape:
            break
        transposed, above = transposed or turns, before
    wanted = shape[::-1] if transposed else shape
    is_same = leaf is not None and leaf.dtype.is_complex == made.dtype.is_complex
    if leaf is None or not is_same or (form != "entries" and torch.Size(leaf.shape) != wanted):
        return Operand(Computed(slot, place, shape, made.dtype, made.device), shape)
    return Operand(leaf, shape, transposed)


def is_transpose(node: Node) -> bool:
    """Tell whether a node transposes a matrix; ``t()`` leaves vectors as they are."""
    return name_of_node(node) in ("T", "Transpose") and len(made_by(node)[0].shape) == 2


def has_complex_numbers(node: Node) -> bool:
    """Tell whether a node has complex inputs or outputs."""
    above = [made_by(each)[number] for each, number in node.next_functions if each is not None]
    return any(each.dtype.is_complex for each in made_by(node) + above)


@dataclass(frozen=True, eq=False)
class NodeCall:
    """A node, and one place where a parameter enters it.

    Args:
        slot: Holds the node.
        place: The place of the parameter among the node's ``next_functions``, which are the tensor arguments
            of the function in their order.
        operand: The parameter, as an input of the node.
        shapes: Shapes of the node's outputs.
        holds: Whether to read the node's saved tensors now, because the node may be freed before they are
            needed.
    """

    slot: NodeSlot
    place: int
    operand: Operand
    shapes: Sequence[torch.Size]
    holds: bool

    @property
    def node(self) -> Any:
        """The node."""
        return self.slot.node

    @property
    def name(self) -> str:
        """The name of the node, without the suffix that all nodes have."""
        return name_of_node(self.node)

    @property
    def shape(self) -> torch.Size:
        """Shape of the first output."""
        return self.shapes[0]

    @property
    def aligned(self) -> tuple[int, ...]:
        """The parameter's shape among the axes of the first output, aligned on the right."""
        own = self.operand.shape
        return (1,) * (len(self.shape) - len(own)) + tuple(own)

    @property
    def edge(self) -> GradientEdge:
        """The edge of the parameter."""
        return GradientEdge(*self.node.next_functions[self.place])

    def saved(self, name: str | int) -> Callable[[], Tensor]:
        """Return a function that returns a tensor saved by the node.

        ``name`` is the name in PyTorch's list of derivatives; for a ``torch.autograd.Function`` of your own, it
        is the index in ``ctx.saved_tensors``.
        """
        if not self.holds:
            return functools.partial(self._read, name)
        tensor = self._read(name)
        return lambda: tensor

    def _read(self, name: str | int) -> Tensor:
        tensor: Tensor = saved_tensor(self.slot.node, name)
        if not isinstance(name, str) or not is_sparse(tensor):  # a user's rule may take any layout
            return tensor
        raise PackpropError(
            "A quantity beyond the gradient was asked for.",
            self.node.name() + (", in a checkpoint" if keeps_elsewhere(self.node) else ""),
            f"it takes a constant of the layout {tensor.layout}: packprop takes these in products of matrices "
            "alone, and not in a checkpoint, which hides the layout",
            "give it a dense tensor, x.to_dense(); or leave a product of matrices out of its checkpoint",
        )

    def option(self, name: str) -> Any:
        """Return a number or a list that the node saved."""
        return saved_option(self.node, name)

    def has_option(self, name: str) -> bool:
        """Tell whether the node has an option of this name: nodes of one family may differ."""
        return has_option(self.node, name)

    @property
    def is_sparse(self) -> bool:
        """Tell whether torch's own gradient of a table is sparse; ``vmap`` cannot make it dense."""
        return self.has_option("sparse") and bool(self.option("sparse"))

    def attribute(self, name: str) -> Any:
        """Return a value that a ``torch.autograd.Function`` of your own has put on its ``ctx``."""
        return getattr(self.node, name)

    def shape_at(self, place: int) -> torch.Size | None:
        """Return the shape of the node's input at a place; ``None`` if it needs no gradient."""
        above, number = self.node.next_functions[place]
        return None if above is None else torch.Size(made_by(above)[number].shape)

    def products(self, columns: Sequence[Tensor | None]) -> Tensor:
        """Return gradients of the parameter from columns ``[v, *y]``, before autograd sums broadcast axes."""
        given = [number for number, each in enumerate(columns) if each is not None]
        there = [each for each in columns if each is not None]
        count = len(there[0])

        def pull(*each: Tensor) -> Tensor:
            return self._product(dict(zip(given, each, strict=True)), len(columns))

        def one_by_one(columns: Sequence[Tensor]) -> Tensor:
            return torch.stack([pull(*each) for each in zip(*columns, strict=True)])

        if count == 1 or self.is_sparse:
            return one_by_one(there)
        try:
            with warnings.catch_warnings():  # for functions that vmap calls once for each column
                warnings.filterwarnings("ignore", "There is a performance drop")
                if self._is_vectorised(given, there, torch.vmap(pull), one_by_one):
                    made: Tensor = torch.vmap(pull)(*there)
                    return made
        except RuntimeError:
            pass
        return one_by_one(there)

    def _is_vectorised(
        self,
        outputs: Sequence[int],
        columns: Sequence[Tensor],
        vectorised: Callable[..., Tensor],
        one_by_one: Callable[..., Tensor],
    ) -> bool:
        """Tell whether a vectorised call on columns at some outputs is right, by a trial on random numbers."""
        shapes = [(min(PROBES, len(each)), *each.shape[1:]) for each in columns]
        case = self.form, *outputs, *shapes, *((each.dtype, each.device.type) for each in columns)
        verdict = _VECTORISED.get(case, is_dry_run() or None)  # a dry run trusts batching rules
        if verdict is not None or is_traced():
            return bool(verdict)
        drawn = torch.Generator().manual_seed(0)
        probes = [
            torch.randn(own, generator=drawn, dtype=each.dtype, device="cpu").to(each.device)
            for each, own in zip(columns, shapes, strict=True)
        ]
        known, tried = one_by_one(probes), vectorised(*probes)
        is_right = _is_close(tried, known)
        if bool(known.isfinite().all() & known.any()):  # zeros and NaN prove nothing
            _VECTORISED.note(case, is_right)
        return is_right

    @property
    def form(self) -> tuple[Any, ...]:
        """The facts that decide on the node's work, except factors and the values of tensors."""
        node = self.node
        inputs = [above and tuple(made_by(above)[number].shape) for above, number in node.next_functions]
        given = self.place, self.operand.shape, *self.shapes, *inputs
        return type(node), node.name(), *given, *facts_of(node)

    def _product(self, cotangents: dict[int, Tensor], outputs: int) -> Tensor:
        """Return the gradient of the parameter from one cotangent at each of some outputs."""
        node, place = self.node, self.place
        given: list[Tensor | None] = [cotangents.get(number) for number in range(outputs)]
        first = next(iter(cotangents.values()))
        run: Callable[..., Any] = node
        if isinstance(
            node, BackwardCFunction
        ):  # it runs the user's code, which takes zeros for missing cotangents
            run, place = functools.partial(Draws().call, node.apply), _place_of_gradient(node, place)
            given = [first.new_zeros(s) if c is None else c for c, s in zip(given, self.shapes, strict=False)]
        with saved_again(node):
            out = run(*given)
        product = out[place] if isinstance(out, tuple) else out
        if product is None and not isinstance(node, BackwardCFunction):  # this pass does not go there
            with saved_again(node):
                out = in_a_pass_of_its_own(lambda: node(*given))
            product = out[place] if isinstance(out, tuple) else out
        if product is None:  # it does not depend on the parameter
            return first.new_zeros(self.operand.shape)
        strided: Tensor = product.to_dense() if product.is_sparse else product
        return strided


class _Inside(torch.autograd.Function):
    """An identity that calls a given function in its backward pass."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, run: Callable[[], Any], made: list[Any]) -> Tensor:
        ctx.run, ctx.made = run, made
        return trigger.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        ctx.made.append(ctx.run())
        return None, None, None


def in_a_pass_of_its_own(run: Callable[[], Any]) -> Any:
    """Call a function inside an unrestricted backward pass, even if a restricted pass runs already."""
    made: list[Any] = []
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        trigger: Tensor = _Inside.apply(torch.zeros((), requires_grad=True, device="cpu"), run, made)  # type: ignore[no-untyped-call]  # torch's own
    torch.autograd.backward(trigger, create_graph=differentiable)
    return made[0]


def _place_of_gradient(node: Any, place: int) -> int:
    """Return the position of a gradient among those of all arguments; the graph counts tensors alone."""
    needs: tuple[bool, ...] = node.needs_input_grad
    before = sum(above is not None for above, _ in node.next_functions[:place])
    wanted = [number for number, need in enumerate(needs) if need]
    return wanted[before] if before < len(wanted) else place


def _is_close(tried: Tensor, known: Tensor) -> bool:
    """Tell whether two results are equal up to rounding; NaN equals nothing."""
    if tried.shape != known.shape or not known.numel():
        return tried.shape == known.shape
    tolerance = torch.finfo(known.dtype).eps ** 0.5
    return bool((tried - known).abs().amax() <= tolerance * known.abs().amax())
