"""Vector-Jacobian products by autograd, of one column or of many."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from packprop.functions.nodes import DIFFERENTIABLE_ONCE, WITHOUT_DATA, WRONG_IN_COLUMNS, name_of_node
from packprop.graph.search import nodes_above
from packprop.recording.marks import marks_of
from packprop.tensors.repeated import of_columns, one_by_one

WRONG = "packprop: wrong in columns"
"""Key in the metadata of a node: whether what it made may not be pulled back in many columns at once."""


DATA_GIVEN = "packprop: zeros with data"
"""Key in the metadata of a node that hands zeros on with their data."""


def derivatives(
    outputs: Sequence[Any],
    ends: Sequence[Any],
    seeds: Sequence[Tensor | None] | None = None,
    *,
    create_graph: bool = False,
    retain_graph: bool = True,
    batched: bool = False,
) -> list[Tensor | None]:
    """``torch.autograd.grad``, but where products shall be differentiable, they are so through more functions.

    Args:
        outputs: Tensors or edges to begin at.
        ends: Tensors or edges where products are wanted; those that are not reached get ``None``.
        seeds: One for each output, unless all are scalars.
        create_graph: Whether products shall be differentiable.
        retain_graph: Whether the graph stays.
        batched: Whether seeds and products have a leading axis of columns.
    """
    with _with_slopes(outputs) if create_graph else contextlib.nullcontext():
        products: Any = torch.autograd.grad(
            list(outputs),
            list(ends),
            None if seeds is None else list(seeds),
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
            is_grads_batched=batched,
        )
    if create_graph:
        _give_data(products)
    return list(products)


@contextlib.contextmanager
def _with_slopes(outputs: Iterable[Any]) -> Iterator[None]:
    """Inside, nodes of ``DIFFERENTIABLE_ONCE`` multiply by their slopes, which are constant by parts.

    A node is run on ones, which gives its slopes. It is run once: a checkpoint gives it what it saved once.
    """
    given: dict[Node, Tensor] = {}

    def with_ones(node: Node, cotangents: Sequence[Tensor | None]) -> Any:
        (cotangent,) = cotangents
        if cotangent is None:
            return None
        given[node] = cotangent
        return (torch.ones_like(cotangent, requires_grad=False),)

    def scaled(node: Node, slopes: Sequence[Tensor | None]) -> Any:
        (slope,), cotangent = slopes, given.pop(node, None)
        return None if slope is None or cotangent is None else (cotangent * slope.detach(),)

    starts = [output.grad_fn if isinstance(output, Tensor) else output.node for output in outputs]
    once = [node for node in nodes_above(starts) if name_of_node(node) in DIFFERENTIABLE_ONCE]
    handles = [node.register_prehook(functools.partial(with_ones, node)) for node in once]
    handles += [node.register_hook(lambda slopes, _, node=node: scaled(node, slopes)) for node in once]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_wrong_in_columns(outputs: Sequence[Any]) -> bool:
    """Whether PyTorch pulls many columns back from gradients wrongly: there may be no error that says so."""
    starts = [output.grad_fn for output in outputs if isinstance(output, Tensor) and output.grad_fn is not None]
    if not starts:
        return False
    marks = marks_of(starts[0])
    if WRONG not in marks:
        marks[WRONG] = any(name_of_node(node) in WRONG_IN_COLUMNS for node in nodes_above(starts))
    return bool(marks[WRONG])


def _give_data(gradients: Iterable[Tensor | None]) -> None:
    """Have nodes that these gradients were computed from hand on zeros that hold data: see ``WITHOUT_DATA``."""

    def with_data(products: Sequence[Tensor | None], _: Any) -> Any:
        return tuple(None if product is None else product.clone() for product in products)

    for node in nodes_above(gradient.grad_fn for gradient in gradients if gradient is not None):
        if name_of_node(node) in WITHOUT_DATA and DATA_GIVEN not in marks_of(node):
            marks_of(node)[DATA_GIVEN] = True
            node.register_hook(with_data)


def _aligned(column: Tensor) -> Tensor:
    """A column that begins where ``torch.view_as_complex`` takes pairs of it: at an even place."""
    return column.clone() if column.storage_offset() % 2 else column


def pull_columns(
    outputs: Sequence[Any],
    ends: Sequence[Any],
    seeds: Sequence[Tensor],
    *,
    batched: bool = True,
    create_graph: bool = False,
    retain_graph: bool = True,
) -> list[Tensor | None]:
    """Vector-Jacobian products of many columns ``[v, *y]``, one after the other where they cannot be batched.

    Args:
        outputs: Tensors or edges where the columns are fed in.
        ends: Tensors or edges where products are wanted; those that are not reached get ``None``.
        seeds: Columns for each output; without their axis unless ``batched``.
        batched: Whether there is an axis of columns.
        create_graph: Whether products shall be differentiable.
        retain_graph: Whether the graph stays; where ``batched``, it always does.
    """

    def pull(given: Sequence[Tensor], batched: bool, retain_graph: bool = True) -> list[Tensor | None]:
        products = derivatives(
            outputs, ends, given, create_graph=create_graph, retain_graph=retain_graph, batched=batched
        )
        return [
            product.to_dense() if product is not None and product.is_sparse else product for product in products
        ]

    if not batched:
        return pull(seeds, False, retain_graph)
    count = len(seeds[0])
    if count > 1 and not _is_wrong_in_columns(outputs):
        try:
            if create_graph:
                return pull(seeds, batched=True)
            return of_columns(functools.partial(pull, batched=True), seeds)
        except RuntimeError:  # a function without batching rule; any other error is raised again below
            pass
    columns = one_by_one(count, lambda place: pull([_aligned(seed[place]) for seed in seeds], batched=False))
    return [
        None if pieces[0] is None else torch.stack([piece for piece in pieces if piece is not None])
        for pieces in zip(*columns, strict=True)
    ]
