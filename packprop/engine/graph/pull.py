"""Vector-Jacobian products by autograd, of one column or of many."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from packprop.engine.functions.nodes import DIFFERENTIABLE_ONCE, WITHOUT_DATA, WRONG_IN_COLUMNS, name_of_node
from packprop.engine.graph.search import nodes_above
from packprop.engine.recording.marks import marks_of
from packprop.engine.tensors.repeated import of_columns, one_by_one

WRONG = "packprop: wrong in columns"
"""Key in the metadata of a node; the value tells whether PyTorch pulls many columns back from it wrongly."""


DATA_GIVEN = "packprop: zeros with data"
"""Key in the metadata of a node with a hook that gives its zeros data."""


def derivatives(
    outputs: Sequence[Any],
    ends: Sequence[Any],
    seeds: Sequence[Tensor | None] | None = None,
    *,
    create_graph: bool = False,
    retain_graph: bool = True,
    batched: bool = False,
) -> list[Tensor | None]:
    """Call ``torch.autograd.grad``; with ``create_graph``, make products differentiable through more functions.

    Args:
        outputs: Tensors or edges to begin at.
        ends: Tensors or edges to return products at; the product is ``None`` if an end is not reached.
        seeds: One for each output; optional if all outputs are scalars.
        create_graph: Whether products are differentiable.
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
    """Make nodes of ``DIFFERENTIABLE_ONCE`` multiply by their slopes, which are piecewise constant.

    Each node runs on ones, which gives its slopes. It runs only once, because a checkpoint returns saved
    tensors only once.
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
    """Tell whether PyTorch pulls many columns back from gradients wrongly, perhaps without an error."""
    starts = [output.grad_fn for output in outputs if isinstance(output, Tensor) and output.grad_fn is not None]
    if not starts:
        return False
    marks = marks_of(starts[0])
    if WRONG not in marks:
        marks[WRONG] = any(name_of_node(node) in WRONG_IN_COLUMNS for node in nodes_above(starts))
    return bool(marks[WRONG])


def _give_data(gradients: Iterable[Tensor | None]) -> None:
    """Make nodes that these gradients were computed from return zeros with data; see ``WITHOUT_DATA``."""

    def with_data(products: Sequence[Tensor | None], _: Any) -> Any:
        return tuple(None if product is None else product.clone() for product in products)

    for node in nodes_above(gradient.grad_fn for gradient in gradients if gradient is not None):
        if name_of_node(node) in WITHOUT_DATA and DATA_GIVEN not in marks_of(node):
            marks_of(node)[DATA_GIVEN] = True
            node.register_hook(with_data)


def _aligned(column: Tensor) -> Tensor:
    """Return a column at an even offset in its storage, as ``torch.view_as_complex`` needs it."""
    return column.clone() if column.storage_offset() % 2 else column


def as_dense(products: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return products with all of their entries, even if PyTorch returns only the nonzero rows of a table."""
    return [each.to_dense() if each is not None and each.is_sparse else each for each in products]


def pull_columns(
    outputs: Sequence[Any],
    ends: Sequence[Any],
    seeds: Sequence[Tensor],
    *,
    batched: bool = True,
    create_graph: bool = False,
    retain_graph: bool = True,
) -> list[Tensor | None]:
    """Return vector-Jacobian products of many columns ``[v, *y]``, one by one where batching fails.

    The arguments are those of ``derivatives``; with ``batched``, the graph always stays.
    """

    def pull(given: Sequence[Tensor], batched: bool, retain_graph: bool = True) -> list[Tensor | None]:
        products = derivatives(
            outputs, ends, given, create_graph=create_graph, retain_graph=retain_graph, batched=batched
        )
        return as_dense(products)

    if not batched:
        return pull(seeds, False, retain_graph)
    count = len(seeds[0])
    if not count:
        return [None] * len(ends)
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
