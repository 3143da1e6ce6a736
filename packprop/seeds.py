"""Columns that are fed in at a loss's input: the square root of its Hessian, whole or sampled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.errors import BadInput, PackpropError
from packprop.graph import FoundLoss, Graph, made_by
from packprop.losses import (
    Loss,
    Root,
    canonical,
    describe,
    from_canonical,
    input_of,
    matrix_root,
    without_classes,
)
from packprop.memory import found_fault, is_hooked, version
from packprop.nodes import is_once_differentiable, nodes_above
from packprop.samples import layouts_at
from packprop.types import EMPIRICAL, ENTRYWISE, EXACT, Layout, Seed


@dataclass(frozen=True)
class Columns:
    """Columns that are fed in together, made when they are needed.

    Args:
        edges: Where they are fed in: the inputs of one or more losses.
        count: How many there are.
        chunk: ``(start, stop) -> [v, *f]`` for each edge.
        weights: What squares of each column and sample are multiplied by ``[v, n]``; ``None`` for 1.
        bare: Whether there is one edge, and no hook of the user's on it.
    """

    edges: Sequence[GradientEdge]
    count: int
    chunk: Callable[[int, int], list[Tensor]]
    weights: Tensor | None = None
    bare: bool = False


def unit_columns(
    shape: torch.Size, layout: Layout, like: Tensor, start: int = 0, stop: int | None = None
) -> Tensor:
    """Columns that are 1 at one entry of every sample, all or from ``start`` to ``stop``: ``[v, *shape]``.

    Samples share memory where that is possible: columns are to be read only.
    """
    rest = layout.front_shape(shape)[1:]
    stop = rest.numel() if stop is None else stop
    flat = torch.zeros(stop - start, rest.numel(), dtype=like.dtype, device=like.device)
    flat.diagonal(start).fill_(1.0)
    units = flat.view(stop - start, 1, *rest).expand(-1, layout.samples, *rest)
    return layout.from_front(units, 1)


def output_columns(graph: Graph, seed: Seed) -> list[Columns]:
    """Unit columns at the model's output, whatever was made of it: they are swept back to its Jacobian.

    Raises:
        PackpropError: If there is not one output.
        BadInput: If an entry that was asked for is not there.
    """
    asked = "A Jacobian of the model's output was asked for."
    found = {
        (edge.node, edge.output_nr): (edge, shape)
        for edge, forward, shape in graph.outputs
        if forward.has_parameters
    }
    if len(found) != 1:
        raise PackpropError(
            asked,
            f"{len(found)} outputs of extended modules",
            "it is not clear whose Jacobian is meant",
            "call one extended module once, and let it return one tensor that is used",
        )
    ((edge, shape),) = found.values()
    ways = layouts_at(graph, [(edge, shape)])
    if not isinstance(ways, list):
        raise PackpropError(
            asked,
            f"the output, of shape {list(shape)}",
            "it holds the samples on no axis, or mixes them",
            "keep the samples on one axis of the output",
        )
    count = shape.numel() // graph.samples
    chosen = range(count) if seed.entries is None else seed.entries
    for entry in chosen:
        if not 0 <= entry < count:
            raise BadInput(asked, f"entry {entry}", f"an output has {count} entries", f"give 0 to {count - 1}")
    made = made_by(edge.node)[edge.output_nr]
    like = torch.empty(0, dtype=made.dtype, device=made.device)

    def chunk(start: int, stop: int) -> list[Tensor]:
        if seed.entries is None:
            return [unit_columns(shape, ways[0], like, start, stop)]
        return [torch.cat([unit_columns(shape, ways[0], like, e, e + 1) for e in seed.entries[start:stop]])]

    return [Columns([edge], len(chosen), chunk)]


def columns(graph: Graph, seed: Seed, create_graph: bool) -> list[Columns]:
    """The columns of a generalized Gauss-Newton seed, loss by loss if they are exact.

    Sampled columns of several losses are fed in at once: the draws are independent and of mean zero, so that
    the products between losses vanish in expectation. Empirical ones are: they are what the data had drawn.

    Raises:
        PackpropError: If a loss was not recorded, has no curvature of use, or does not enter linearly.
    """
    if seed.kind == "jacobian":
        return output_columns(graph, seed)
    _require_losses(graph)
    with torch.set_grad_enabled(create_graph):
        found = [_loss_columns(graph, loss, seed) for loss in graph.losses]
    if seed in (EXACT, ENTRYWISE) or len(found) == 1:
        return found

    def together(start: int, stop: int) -> list[Tensor]:
        return [column for each in found for column in each.chunk(start, stop)]

    return [Columns([each.edges[0] for each in found], found[0].count, together)]


def _require_losses(graph: Graph) -> None:
    if not graph.losses:
        raise PackpropError(
            "A generalized Gauss-Newton quantity was asked for.",
            "the tensor that backward() was called on",
            "no recorded loss lies between it and the parameters, so its Hessian is not known",
            "extend the loss module, or call the loss function inside `with packprop.record():`",
        )
    if graph.unlosed:
        raise PackpropError(
            "A generalized Gauss-Newton quantity was asked for.",
            graph.unlosed[0],
            "a path from the tensor that backward() was called on reaches it without passing a recorded loss",
            "compute that part of the loss inside `with packprop.record():` by a loss function, or keep it out "
            "of this backward pass",
        )


def _loss_columns(graph: Graph, loss: FoundLoss, seed: Seed) -> Columns:
    call, layout = loss.call, loss.layout
    rule = describe(call.function, call.args, call.kwargs)
    if rule.refusal is not None:
        raise PackpropError(
            "A generalized Gauss-Newton quantity was asked for.",
            f"the loss {getattr(call.function, '__name__', call.function)}",
            *rule.refusal,
        )
    if version(call.input) != call.version:
        raise PackpropError(
            "A generalized Gauss-Newton quantity was asked for.",
            f"the input of the loss, of shape {list(call.shape)}",
            "it was changed in place after the loss was computed",
            "clone it before changing it",
        )
    targets = [value for value in (*call.args[1:], *call.kwargs.values()) if isinstance(value, Tensor)]
    if any(value.requires_grad and value is not call.input for value in targets):
        raise PackpropError(
            "A generalized Gauss-Newton quantity was asked for.",
            f"the targets of {getattr(call.function, '__name__', call.function)}",
            "they require gradients: the loss curves in them too, and that is not accounted for",
            "detach the targets",
        )
    arriving = _arriving(graph, loss)
    if seed == EMPIRICAL:
        return _empirical_column(loss, rule, arriving)
    bare = not is_hooked(call.input)
    if rule.root is None:
        root = generic_root(call.function, call.args, call.kwargs, arriving, layout)
        axis, positions = None, 1
    else:
        axis = rule.class_axis
        value = canonical(call.input, layout, axis)
        root = rule.root(value, _scale(rule, loss, arriving, value))
        positions = value.shape[1]
    place = functools.partial(from_canonical, shape=call.shape, layout=layout, class_axis=axis)
    if seed.mc_samples is not None:
        draws = root.draw(seed.mc_samples, seed.generator) / seed.mc_samples**0.5
        return Columns([call.edge], seed.mc_samples, lambda start, stop: [place(draws[start:stop])], bare=bare)
    if seed.entrywise and root.entrywise is not None:
        root = root.entrywise
    chunk = functools.partial(_exact, root, positions)
    count = positions * root.columns
    return Columns([call.edge], count, lambda start, stop: [place(chunk(start, stop))], bare=bare)


def _empirical_column(loss: FoundLoss, rule: Loss, arriving: Tensor) -> Columns:
    """The gradient of each term over the root of its scale: what a draw that hits the target gives."""
    call, layout, axis = loss.call, loss.layout, rule.class_axis
    if rule.divisor is None:
        raise PackpropError(
            "The empirical Fisher information was asked for.",
            f"the loss {getattr(call.function, '__name__', call.function)}",
            "it is not known what its terms are divided by, so its gradients have no known scale",
            "use a torch loss function, or register_loss with the divisor; fisher='sampled' needs neither",
        )
    outputs, value = _evaluated(call.function, call.args, call.kwargs, arriving)
    (slope,) = torch.autograd.grad(value, outputs, create_graph=torch.is_grad_enabled())
    front = canonical(slope, layout, axis)
    scale = _scale(rule, loss, arriving, front)
    counted = scale > 0
    strength = torch.where(counted, scale, 1.0).rsqrt() * counted
    column = from_canonical((front * strength[..., None])[None], call.shape, layout, axis)
    return Columns([call.edge], 1, lambda start, stop: [column])


def _exact(root: Root, positions: int, start: int, stop: int) -> Tensor:
    """Columns ``start`` to ``stop``, ordered by position, then by entry; zero at all other positions."""
    pieces, places = [], []
    while start < stop:
        position, first = divmod(start, root.columns)
        last = min(root.columns, first + stop - start)
        pieces.append(root.position(position, first, last))
        places += [position] * (last - first)
        start += last - first
    found = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    if positions == 1:
        return found.unsqueeze(2)
    columns, samples, classes = found.shape
    wide = found.new_zeros(columns, samples, positions, classes)
    at = torch.tensor(places, device=found.device)[:, None]
    column, sample = (torch.arange(size, device=found.device) for size in (columns, samples))
    return wide.index_put_((column[:, None], sample, at), found)


def _scale(rule: Loss, loss: FoundLoss, arriving: Tensor, value: Tensor) -> Tensor:
    """What multiplies each term ``[n, t]``: the loss's weights and divisor, and all that comes after it."""
    terms = value.shape[:2]
    layout, shape = without_classes(loss.layout, loss.call.shape, rule.class_axis)
    divisor = 1.0 if rule.divisor is None else rule.divisor
    weight = (rule.weight * arriving / divisor).to(value.dtype)
    return layout.to_front(weight.expand(shape)).reshape(terms)


def _arriving(graph: Graph, loss: FoundLoss) -> Tensor:
    """The gradient of the roots with respect to what the loss function returned.

    Raises:
        PackpropError: If the loss enters nonlinearly or with a negative factor: its curvature is then not that
            of the roots.
    """
    root, given = graph.roots[0], graph.gradients[0]
    if len(graph.roots) == 1 and root.grad_fn is loss.node and given is None:
        return torch.ones_like(root, requires_grad=False)
    edge = GradientEdge(loss.node, loss.output)
    gradients = graph.root_gradients()
    with torch.enable_grad():
        (arriving,) = torch.autograd.grad(graph.roots, edge, gradients, create_graph=True, retain_graph=True)
        curved = None
        if arriving.requires_grad:
            (curved,) = torch.autograd.grad(arriving.sum(), edge, retain_graph=True, allow_unused=True)
    if curved is not None and found_fault((curved != 0).any()):
        raise PackpropError(
            "A generalized Gauss-Newton quantity was asked for.",
            "what was made of the loss after the loss function",
            "it is not linear in the loss, so that it curves by itself",
            "reduce and scale the loss linearly (sum, mean, weights), or give the whole of it as one loss "
            "module",
        )
    if found_fault((arriving < 0).any()):
        raise PackpropError(
            "A generalized Gauss-Newton quantity was asked for.",
            "what the loss was multiplied by",
            "a negative factor makes the matrix negative: it has no square root",
            "ask for the quantities of the loss itself, and change the sign of the result",
        )
    return arriving if torch.is_grad_enabled() else arriving.detach()


def generic_root(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    arriving: Tensor,
    layout: Layout,
) -> Root:
    """The root of a loss that has no rule, from its own second derivatives, sample by sample."""
    differentiable = torch.is_grad_enabled()
    outputs, value = _evaluated(function, args, kwargs, arriving)
    _require_twice(function, value)
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(value, outputs, create_graph=True)
        front = layout.to_front(slope).reshape(layout.samples, -1)
        entries = front.shape[1]
        if not slope.requires_grad:
            return matrix_root(front.new_zeros(layout.samples, entries, entries))

        def product(vector: Tensor) -> Tensor:
            try:
                (row,) = torch.autograd.grad(
                    front,
                    outputs,
                    vector.expand_as(front),
                    retain_graph=True,
                    create_graph=differentiable,
                    allow_unused=True,
                )
            except (RuntimeError, NotImplementedError) as error:
                raise PackpropError(
                    "A generalized Gauss-Newton quantity was asked for.",
                    f"the loss {getattr(function, '__name__', function)}",
                    f"PyTorch cannot differentiate it twice: {error}",
                    "use a twice differentiable loss, or ask for first-order quantities",
                ) from error
            row = torch.zeros_like(outputs) if row is None else row
            return layout.to_front(row).reshape(layout.samples, -1)

        _require_separate(product, front)
        unit = torch.eye(entries, dtype=front.dtype, device=front.device)
        hessian = torch.stack([product(unit[entry]) for entry in range(entries)], 1)
    return matrix_root(0.5 * (hessian + hessian.mT))


def loss_hessian_products(graph: Graph, loss: FoundLoss) -> Callable[[Tensor], Tensor]:
    """From vectors ``[v, *f]`` at a loss's input to their products with its Hessian, scaled as in the roots."""
    call = loss.call
    with torch.no_grad():
        arriving = _arriving(graph, loss)
        outputs, value = _evaluated(call.function, call.args, call.kwargs, arriving)
    _require_twice(call.function, value)
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(value, outputs, create_graph=True)

    def product(vectors: Tensor) -> Tensor:
        if not slope.requires_grad:
            return torch.zeros_like(vectors)
        columns = [torch.autograd.grad(slope, outputs, vector, retain_graph=True)[0] for vector in vectors]
        return torch.stack(columns)

    return product


def _require_twice(function: Callable[..., Any], value: Tensor) -> None:
    """Refuse losses made of functions that are marked as differentiable once."""
    for node in nodes_above([value.grad_fn]):
        if is_once_differentiable(node):
            raise PackpropError(
                "A generalized Gauss-Newton quantity was asked for.",
                f"{node.name()} in the loss {getattr(function, '__name__', type(function).__name__)}",
                "its backward pass is marked once_differentiable: the loss has no second derivative",
                "write its backward pass in differentiable operations and drop the mark",
            )


def _evaluated(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], arriving: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss evaluated again by itself: its input, and its share in the root as a function of that."""
    original, differentiable = input_of(function, args, kwargs), torch.is_grad_enabled()
    with torch.enable_grad():
        outputs = original.view_as(original) if differentiable else original.detach()
        outputs.requires_grad_(True)
        swap = (outputs, *args[1:]) if args else ()
        named = kwargs if args else {**kwargs, "input": outputs}
        return outputs, (function(*swap, **named) * arriving).sum()


def _require_separate(product: Callable[[Tensor], Tensor], front: Tensor) -> None:
    """The Hessian between two samples must vanish: no curvature of single samples exists otherwise."""
    half = torch.arange(front.shape[0], device=front.device) % 2 == 0
    if front.shape[0] == 1:
        return
    leaked = product(half[:, None].to(front.dtype))[1::2]
    scale = product(torch.ones_like(front[:1])).abs().amax()
    if found_fault(leaked.abs().amax() > 1e-6 * scale):
        raise PackpropError(
            "A generalized Gauss-Newton quantity was asked for.",
            "the loss function",
            "its Hessian couples the outputs of different samples",
            "use a loss that is a sum or mean of one term for each sample",
        )
