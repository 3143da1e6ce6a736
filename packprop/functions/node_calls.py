"""A node of the autograd graph that a parameter enters: what it was given, and how it is called by itself.

# NOTE [Nodes as functions]
A node is the derivative of one function, with what it needs saved in it. Called by itself on cotangents it returns
the gradients of its own inputs, whatever else lies in the graph: so a parameter that is used twice, or further up,
has each of its uses apart. It returns them as its formula does, before autograd sums them over the axes that a
parameter was broadcast over. So one sample's part can be taken before the sum. While a pass runs to some ends alone, a node computes gradients of
those inputs that lead there: a sweep in which nodes are called must go to their parameters, too.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from packprop.algebra.structures import Dense, Structure
from packprop.functions.building import select_samples, sum_over_broadcast
from packprop.functions.entry import Call, Cotangents, Entry, Samples, Scratch
from packprop.functions.nodes import RESHAPES, is_identity, name_of_node, names_of_nodes, saved_option
from packprop.functions.saved import saved_again, saved_tensor
from packprop.tensors.dry import is_dry_run
from packprop.tensors.layout import Layout
from packprop.tensors.precision import accumulation_dtype
from packprop.tensors.traced import is_traced

AT_ONCE = 2**22
"""Entries of cotangents that are masked for single samples at once."""


MANY = 1024
"""How many nodes are remembered."""


_VECTORISED: dict[Any, bool] = {}
"""Whether a node of a name, for cotangents of some shapes, is right for many of them at once.

PyTorch's batching rule of one or the other function is wrong: each is compared with one call when it is first used.
"""


@dataclass(frozen=True, eq=False)
class Computed:
    """A tensor that was computed from parameters alone, by where it came from."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def grad_fn(self) -> Node:
        """The node that made it."""
        return self.edge.node

    def numel(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    def dim(self) -> int:
        """Number of axes."""
        return len(self.shape)


@dataclass(frozen=True)
class Operand:
    """A parameter as a node takes it.

    Args:
        tensor: The leaf, if only its shape or its type was changed on the way; else what was computed of leaves.
        shape: Its shape as the node takes it.
        is_transposed: Whether the node takes the transpose of the leaf.
    """

    tensor: Any
    shape: torch.Size
    is_transposed: bool = False


def operand_at(node: Node, place: int, keeps_shape: bool = False) -> Operand:
    """What a node takes at one of its places, followed up to the leaf if nothing but its form was changed.

    ``keeps_shape``: whether the leaf must have the shape that the node takes, or its transpose.
    """
    above, number = node.next_functions[place]
    assert above is not None
    made = _made(above)[number]
    edge, shape, transposed = GradientEdge(above, number), torch.Size(made.shape), False
    while (leaf := getattr(above, "variable", None)) is None:
        name = name_of_node(above)
        before, number = above.next_functions[0] if above.next_functions else (None, 0)
        turns = name == "T" or (name == "Transpose" and len(_made(above)[0].shape) == 2)
        if before is None or (turns and (transposed or torch.Size(_made(above)[0].shape) != shape)):
            break
        if not turns and name not in RESHAPES and name != "ToCopy":
            break
        transposed, above = transposed or turns, before
    wanted = shape[::-1] if transposed else shape
    is_other = leaf is not None and leaf.dtype.is_complex != made.dtype.is_complex
    if leaf is None or is_other or ((transposed or keeps_shape) and torch.Size(leaf.shape) != wanted):
        return Operand(Computed(edge, shape, made.dtype, made.device), shape)
    return Operand(leaf, shape, transposed)


REARRANGING = RESHAPES | names_of_nodes("Permute Transpose T ToCopy Repeat")
"""Functions of all entries of a tensor, each at other places: their nodes need nothing but shapes."""


def rearranged(node: Node, place: int) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
    """The leaf that a node takes, if its entries were only put at other places on the way, and the way back.

    The way back leads from gradients of what the node takes ``[v, n, *y]`` to gradients of the leaf ``[v, n, *p]``.
    """
    above, way = node.next_functions[place][0], list[Callable[[Tensor], Tensor]]()
    while above is not None and (leaf := getattr(above, "variable", None)) is None:
        name = name_of_node(above)
        below, number = above.next_functions[0] if above.next_functions else (None, 0)
        if below is None or name not in REARRANGING or is_identity(above):
            return None
        shape = torch.Size(_made(below)[number].shape)
        way.append(_way_back(above, name, shape))
        above = below
    if above is None:
        return None

    def back(rows: Tensor) -> Tensor:
        for each in way:
            rows = each(rows)
        return rows

    return leaf, back


def _way_back(node: Any, name: str, shape: torch.Size) -> Callable[[Tensor], Tensor]:
    """From gradients of what a node of ``REARRANGING`` made ``[v, n, *y]`` to those of its input ``[v, n, *shape]``."""
    if name == "Permute":
        dims = [axis % len(shape) + 2 for axis in node._saved_dims]
        order = sorted(range(len(dims)), key=dims.__getitem__)
        return lambda rows: rows.permute(0, 1, *(axis + 2 for axis in order))
    if name in ("T", "Transpose") and len(shape) > 1:
        first, second = (0, 1) if name == "T" else (saved_option(node, "dim0"), saved_option(node, "dim1"))
        return lambda rows: rows.transpose(first % len(shape) + 2, second % len(shape) + 2)
    if name == "Repeat":
        times = list(node._saved_repeats)
        sizes = (1,) * (len(times) - len(shape)) + tuple(shape)
        pairs = [extent for pair in zip(times, sizes, strict=True) for extent in pair]
        axes = list(range(2, 2 + len(pairs), 2))
        return lambda rows: rows.reshape(*rows.shape[:2], *pairs).sum(axes).reshape(*rows.shape[:2], *shape)
    return lambda rows: rows.reshape(*rows.shape[:2], *shape)


def _made(node: Node) -> list[Any]:
    leaf = getattr(node, "variable", None)
    return list(node._input_metadata) if leaf is None else [leaf]


def has_complex_numbers(node: Node) -> bool:
    """Whether complex numbers go into a node or come out."""
    if any(each.dtype.is_complex for each in _made(node)):
        return True
    above = ((each, number) for each, number in node.next_functions if each is not None)
    return any(_made(each)[number].dtype.is_complex for each, number in above)


@dataclass(frozen=True, eq=False)
class NodeCall:
    """A node, and one place where a parameter enters it.

    Args:
        node: The node.
        place: The place of the parameter among its ``next_functions``.
        operand: The parameter.
        shapes: Shapes of its outputs.
        holds: Whether what the node saved is read now, because the node may be freed before it is needed.
    """

    node: Any
    place: int
    operand: Operand
    shapes: Sequence[torch.Size]
    holds: bool

    @property
    def shape(self) -> torch.Size:
        """Shape of the first output."""
        return self.shapes[0]

    def saved(self, name: str) -> Callable[[], Tensor]:
        """A tensor that the node saved."""
        if not self.holds:
            return lambda: saved_tensor(self.node, name)  # type: ignore[no-any-return]  # a tensor by its name
        tensor: Tensor = saved_tensor(self.node, name)
        return lambda: tensor

    def option(self, name: str) -> Any:
        """A number or a list that the node saved."""
        return saved_option(self.node, name)

    def shape_at(self, place: int) -> torch.Size | None:
        """The shape of what the node was given at a place; ``None`` for what needs no gradient."""
        above, number = self.node.next_functions[place]
        return None if above is None else torch.Size(_made(above)[number].shape)

    def stand_in(self) -> Call:
        """What the builders of entries know of a call."""
        name = name_of_node(self.node)
        return Call(_Named(name), (), {}, (), self.shape, lambda tensor: tensor)

    def products(self, columns: Sequence[Tensor | None]) -> Tensor:
        """The gradients of the parameter from columns ``[v, *y]`` at the outputs, as the node returns them."""
        node, place = self.node, self.place
        run = node.apply if isinstance(node, BackwardCFunction) else node
        given = [number for number, each in enumerate(columns) if each is not None]
        count = next(len(each) for each in columns if each is not None)

        def pull(*each: Tensor) -> Tensor:
            cotangents: list[Tensor | None] = [None] * len(columns)
            for number, own in zip(given, each, strict=True):
                cotangents[number] = own
            with saved_again(node):
                out = run(*cotangents)
            product = out[place] if isinstance(out, tuple) else out
            if product is None:  # a user's function may say so of what does not depend on a parameter
                assert isinstance(node, BackwardCFunction) or len(given) < len(columns), node.name()
                return each[0].new_zeros(self.operand.shape)
            return product.to_dense() if product.is_sparse else product

        there = [each for each in columns if each is not None]
        if count == 1:
            return pull(*(each[0] for each in there)).unsqueeze(0)
        key = (node.name(), place, *(tuple(each.shape[1:]) for each in there))
        if _VECTORISED.get(key, True) is False:
            return torch.stack([pull(*(each[k] for each in there)) for k in range(count)])
        try:
            with warnings.catch_warnings():  # of functions that are called once for each column
                warnings.filterwarnings("ignore", "There is a performance drop")
                made: Tensor = torch.vmap(pull)(*there)
            if key in _VECTORISED or is_dry_run() or is_traced():
                return made
            if len(_VECTORISED) >= MANY:
                _VECTORISED.clear()
            _VECTORISED[key] = _is_sum(made, pull(*(each.sum(0) for each in there)))
            if _VECTORISED[key]:
                return made
        except RuntimeError:
            pass
        return torch.stack([pull(*(each[k] for each in there)) for k in range(count)])


def _is_sum(columns: Tensor, whole: Tensor) -> bool:
    """Whether gradients of columns add up to that of their sum, as those of a linear function do."""
    if not whole.numel() or columns.shape[1:] != whole.shape:
        return columns.shape[1:] == whole.shape
    total, wide = columns.sum(0), columns.abs().amax() * len(columns)
    tolerance = torch.finfo(whole.dtype).eps ** 0.5
    difference = (total - whole).abs().amax()
    return not bool(difference > tolerance * wide) and bool(difference.isfinite() | ~wide.isfinite())


@dataclass(frozen=True)
class _Named:
    """In place of a function, of which messages need the name."""

    name: str

    @property
    def __name__(self) -> str:
        return self.name


def broadcast(call: NodeCall, **known: Any) -> Entry:
    """The entry of an operand that is broadcast against the output, whatever the node does entry by entry."""
    parameter, dims = call.operand.tensor, len(call.shape)
    aligned = (1,) * (dims - len(call.operand.shape)) + tuple(call.operand.shape)

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        layout, cotangent = layouts[0], cotangents[0]
        if cotangent is None:
            return Dense(None)
        product = call.products([cotangent])
        if product.shape != cotangent.shape:
            return samplewise(call).structure_of(cotangents, layouts, samples)
        product = select_samples(layout.to_front(product, 1), samples, 1)
        rows = sum_over_broadcast(product, layout, aligned, samples)
        return Dense(rows.reshape(*rows.shape[:2], *parameter.shape))

    edge = GradientEdge(*call.node.next_functions[call.place])
    return Entry(parameter, "Scale", structure_of, calls_node=lambda layouts: edge, **known)


def samplewise(call: NodeCall, **known: Any) -> Entry:
    """The entry of a node without a rule: it is called on each sample's part of the cotangent alone."""
    parameter = call.operand.tensor

    def structure_of(cotangents: Cotangents, layouts: Sequence[Layout], samples: Samples) -> Structure:
        arrived = [each for each in cotangents if each is not None]
        if not arrived:
            return Dense(None)
        numbers = _numbers(samples, layouts[0].samples)
        columns = len(arrived[0])
        entries = sum(each[:1].numel() for each in arrived) * columns
        step = max(1, AT_ONCE // max(1, entries))
        rows = []
        for start in range(0, len(numbers), step):
            own = numbers[start : start + step]
            masked = [
                None if each is None else _of_samples(own, each, layout).flatten(0, 1)
                for each, layout in zip(cotangents, layouts, strict=False)
            ]
            products = call.products(masked)
            if call.operand.shape != products.shape[1:]:
                products = products.sum_to_size(len(products), *_aligned(call.operand.shape, products.dim() - 1))
            rows.append(products.reshape(columns, len(own), *parameter_shape))
        whole = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        whole = whole.mT if call.operand.is_transposed else whole
        whole = whole.reshape(*whole.shape[:2], *parameter.shape)
        return Dense(whole.to(accumulation_dtype(whole.dtype)))

    parameter_shape = call.operand.shape
    scratch = Scratch(parameter.numel())
    edge = GradientEdge(*call.node.next_functions[call.place])
    return Entry(parameter, "Dense", structure_of, scratch=scratch, calls_node=lambda layouts: edge, **known)


def _aligned(shape: torch.Size, dims: int) -> tuple[int, ...]:
    return (1,) * (dims - len(shape)) + tuple(shape)


def _numbers(samples: Samples, count: int) -> list[int]:
    if isinstance(samples, slice):
        return list(range(count)[samples])
    return list(range(len(samples))) if is_dry_run() else samples.tolist()


def _of_samples(numbers: Sequence[int], cotangent: Tensor, layout: Layout) -> Tensor:
    """A cotangent ``[v, *y]`` for each of some samples, zero in the rows of all others: ``[v, m, *y]``."""
    if layout.axis is None:
        return cotangent.unsqueeze(1)
    owner = layout.sample_of(cotangent.device)
    own = owner == torch.tensor(list(numbers), device=cotangent.device).unsqueeze(1)  # [m, k]
    behind = cotangent.dim() - 1 - layout.behind
    form = [len(numbers), *[1] * layout.axis, *(layout.joined or (-1,)), *[1] * behind]
    return torch.where(own.reshape(form), cotangent.unsqueeze(1), cotangent.new_zeros(()))
