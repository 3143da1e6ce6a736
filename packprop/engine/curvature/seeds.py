"""Seed vectors as columns: roots of losses' Hessians, exact or sampled, and unit columns for Jacobians."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.engine.curvature.columns import Columns, unit_columns
from packprop.engine.curvature.generic_loss import (
    GGN_ASKED,
    generic_root,
    loss_factor,
    loss_gradient,
    loss_hessian_products,
    require_root,
    require_unchanged_input,
)
from packprop.engine.curvature.second_order import in_order
from packprop.engine.curvature.tokens import (
    TOKENS_ASKED,
    columns_by_token,
    counted_tokens,
    gradient_by_token,
    require_constant_arguments,
    require_losses,
    token_count,
)
from packprop.engine.functions.losses.description import (
    Root,
    canonical,
    from_canonical,
    weight_of_terms,
    without_classes,
)
from packprop.engine.graph.graph import Graph, ReachedLoss
from packprop.engine.samples.separation import places_at
from packprop.engine.tensors.dry import has_fault
from packprop.engine.tensors.precision import accumulation_dtype
from packprop.errors import BadInput, PackpropError
from packprop.types import EMPIRICAL, ENTRYWISE, EXACT, Seed


def jacobian_columns(graph: Graph, seed: Seed) -> list[Columns]:
    """Return unit columns at the model's output, which a sweep turns into its Jacobian.

    Raises:
        PackpropError: If there is not exactly one output.
        BadInput: If the output does not have a requested entry.
    """
    asked = "A Jacobian of the model's output was asked for."
    outputs = {
        (edge.node, edge.output_nr): (edge, shape)
        for edge, forward, shape in graph.outputs
        if forward.has_parameters
    }
    if len(outputs) != 1:
        raise PackpropError(
            asked,
            f"{len(outputs)} outputs of extended modules",
            "it is not clear whose Jacobian is meant",
            "call one extended module once, and let it return one tensor that is used",
        )
    ((edge, shape),) = outputs.values()
    places = places_at(graph, [edge])
    if not isinstance(places, list):
        raise PackpropError(
            asked,
            f"the output, of shape {list(shape)}",
            "it holds the samples on no axis, or mixes them",
            "keep the samples on one axis of the output",
        )
    (place,) = places
    count = place.layout.front_shape(shape)[1:].numel()
    chosen = range(count) if seed.entries is None else seed.entries
    for entry in chosen:
        if not 0 <= entry < count:
            raise BadInput(asked, f"entry {entry}", f"an output has {count} entries", f"give 0 to {count - 1}")
    like = torch.empty(0, dtype=place.dtype, device=place.device)
    units = functools.partial(unit_columns, shape, place.layout, like)

    def chunk(start: int, stop: int) -> list[Tensor]:
        if seed.entries is None:
            return [units(start, stop)]
        return [torch.cat([units(entry, entry + 1) for entry in seed.entries[start:stop]])]

    return [Columns([edge], len(chosen), chunk)]


def columns(graph: Graph, seed: Seed, create_graph: bool) -> list[Columns]:
    """Return the columns of a seed, in one group for each loss if they are exact columns of a GGN.

    Sampled columns of several losses enter a sweep together: the draws are independent and have mean zero, so
    that products between losses vanish in expectation. Empirical columns, each of which stands for such a draw,
    enter together as well.

    Raises:
        PackpropError: If a loss was not recorded, has no usable curvature, or does not enter linearly.
    """
    if seed.kind == "jacobian":
        return jacobian_columns(graph, seed)
    if seed.by_token:
        require_losses(graph, TOKENS_ASKED, "its terms are")
        with torch.set_grad_enabled(create_graph):
            if seed.kind == "gradient":
                return gradient_by_token(graph)
            return [_loss_columns(graph, loss, seed) for loss in in_order(graph.losses)]
    require_losses(graph, GGN_ASKED, "its Hessian is")
    with torch.set_grad_enabled(create_graph):
        by_loss = [_loss_columns(graph, loss, seed) for loss in graph.losses]
    if len(by_loss) == 1 or seed in (EXACT, ENTRYWISE):
        return by_loss

    def together(start: int, stop: int) -> list[Tensor]:
        return [column for each in by_loss for column in each.chunk(start, stop)]

    return [Columns([each.edges[0] for each in by_loss], by_loss[0].count, together)]


def loss_hessians(graph: Graph) -> tuple[list[GradientEdge], list[Callable[[Tensor], Tensor]]]:
    """Return the entrances of all losses, and for each the product with its Hessian.

    Raises:
        PackpropError: If a loss has no GGN.
    """
    columns(graph, EXACT, create_graph=False)  # refuses such losses; columns are made on demand
    losses = graph.losses
    return [loss.entrance.edge for loss in losses], [loss_hessian_products(graph, loss) for loss in losses]


def _loss_columns(graph: Graph, loss: ReachedLoss, seed: Seed) -> Columns:
    """Return the columns of one loss."""
    call, layout = loss.call, loss.layout
    given = call.input
    if given.is_complex():
        raise PackpropError(
            GGN_ASKED,
            f"the loss {call.name}",
            "its input is complex: real and imaginary parts curve together, which no rule of a loss describes",
            "give the loss real numbers, as torch.view_as_real(output)",
        )
    entrance = loss.entrance
    rule = entrance.rule
    if rule.refusal is not None:
        raise PackpropError(GGN_ASKED, f"the loss {call.name}", *rule.refusal)
    require_unchanged_input(call, GGN_ASKED)
    require_constant_arguments(
        loss,
        GGN_ASKED,
        "the loss curves in both together: a generalized Gauss-Newton matrix needs a loss that the model's "
        "output alone enters",
        "if one shall (a predicted variance), ask for the Hessian: DiagHessian, BatchDiagHessian, HMP",
    )
    factor = loss_factor(graph, loss)
    tokens = token_count(loss) if seed.by_token else 0
    if seed.kind == EMPIRICAL.kind:
        return _empirical_column(loss, factor)
    if rule.root is None:
        root = generic_root(loss, factor)
        axis, positions = None, 1
    else:
        axis = rule.class_axis
        value = canonical(entrance.values(given), layout, axis)
        scale = _scale(loss, factor, value)
        root = rule.root(value, scale)
        require_root(graph, loss, root, scale)
        positions = value.shape[1]
    place = functools.partial(entrance.put, call, layout, axis)
    if seed.mc_samples is not None:
        draws = root.draw(seed.mc_samples, seed.generator)
        draws = draws if seed.mc_samples == 1 else draws / seed.mc_samples**0.5
        if tokens:
            return columns_by_token(graph, loss, entrance, draws)
        if seed.mc_samples == 1:
            return Columns([entrance.edge], 1, lambda start, stop: [place(draws)])
        return Columns([entrance.edge], seed.mc_samples, lambda start, stop: [place(draws[start:stop])])
    if seed.entrywise and root.entrywise is not None:
        root = root.entrywise
    chunk = functools.partial(_exact_columns, root, positions, seed.entrywise)
    count = positions * root.columns
    counted = counted_tokens(graph, loss) if tokens else None
    return Columns([entrance.edge], count, lambda start, stop: [place(chunk(start, stop))], counted=counted)


def _empirical_column(loss: ReachedLoss, factor: Tensor | None) -> Columns:
    """Return gradients of terms divided by the roots of their scales: the column of a draw of the target."""
    call, layout, rule = loss.call, loss.layout, loss.entrance.rule
    if rule.divisor is None:
        raise PackpropError(
            "The empirical Fisher information was asked for.",
            f"the loss {call.name}",
            "it is not known what its terms are divided by, so its gradients have no known scale",
            "use a loss function of torch; or declare the divisor: @packprop.register_loss(MyLoss) on a rule "
            "that returns packprop.functions.Loss(..., divisor=...), for the class MyLoss of your loss module; "
            "fisher='sampled' needs neither",
        )
    front = canonical(loss_gradient(loss, call.edge, factor), layout, rule.class_axis)
    scale = _scale(loss, factor, front)
    counted = scale > 0
    inverse_root = torch.where(counted, scale, 1.0).rsqrt() * counted
    column = from_canonical((front * inverse_root[..., None])[None], call.shape, layout, rule.class_axis)
    return Columns([call.edge], 1, lambda start, stop: [column])


def _exact_columns(root: Root, positions: int, by_entry: bool, start: int, stop: int) -> Tensor:
    """Return columns ``start`` to ``stop``, each zero at all positions but one; a single position has no axis.

    By default they are ordered by position, then by entry, which takes the fewest calls of the root. With
    ``by_entry`` they are ordered by entry, then by position, like the entries of the loss's input.
    """
    if positions == 1:
        return root.position(0, start, stop)
    numbers: defaultdict[int, list[int]] = defaultdict(list)
    for number in range(start, stop):
        numbers[number % positions if by_entry else number // root.columns].append(number)
    pieces = []
    for t, own in numbers.items():
        entries = [number // positions if by_entry else number % root.columns for number in own]
        pieces.append(root.position(t, entries[0], entries[-1] + 1))
    joined = torch.cat(pieces)
    columns, samples, classes = joined.shape
    wide = joined.new_zeros(columns, samples, positions, classes)
    places = [t for t, own in numbers.items() for _ in own]
    order = [number - start for own in numbers.values() for number in own]
    at, column = (torch.tensor(indices, device=joined.device)[:, None] for indices in (places, order))
    return wide.index_put_((column, torch.arange(samples, device=joined.device), at), joined)


def _scale(loss: ReachedLoss, factor: Tensor | None, value: Tensor) -> Tensor:
    """Return the factor on each term ``[n, t]``: weight over divisor, times the factor on the loss.

    Raises:
        PackpropError: If one is negative.
    """
    rule, terms = loss.entrance.rule, value.shape[:2]
    divisor = 1.0 if rule.divisor is None else rule.divisor
    weight = weight_of_terms(rule, factor, loss.call.shape)
    wide = accumulation_dtype(value.dtype)  # sixteen bits may not hold the number of terms
    if isinstance(weight, Tensor) and torch.result_type(weight, divisor) != wide:
        weight = weight.to(wide)  # flags would become numbers of the default precision
    scale = weight / divisor
    if isinstance(rule.weight, Tensor):
        assert isinstance(scale, Tensor)
        is_negative = rule.weight.dtype != torch.bool and has_fault((scale < 0).any())
    else:
        is_negative = rule.weight < 0
    if is_negative:
        raise PackpropError(
            GGN_ASKED,
            f"the loss {loss.call.name}",
            "a weight of its terms is negative, which makes the matrix negative: it has no square root",
            "leave these terms out, or ask for Hessian quantities (DiagHessian, BatchDiagHessian, HMP)",
        )
    if not isinstance(scale, Tensor):
        return value.new_full((), scale).expand(terms)
    layout, shape = without_classes(loss.layout, loss.call.shape, rule.class_axis)
    scale = scale.to(value.dtype)
    scale = scale if scale.shape == shape else scale.expand(shape)
    return layout.to_front(scale).reshape(terms)
