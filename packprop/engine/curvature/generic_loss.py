"""Losses differentiated by autograd: factors, Hessians, losses of single samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.engine.curvature.linear import vjps
from packprop.engine.functions.losses.description import (
    PROVEN,
    Root,
    describe,
    registered,
    without_classes,
)
from packprop.engine.functions.losses.roots import matrix_root
from packprop.engine.functions.nodes import is_from_outside, is_once_differentiable
from packprop.engine.functions.operands import option_of
from packprop.engine.functions.registry import current as rules
from packprop.engine.graph.graph import Graph, ReachedLoss
from packprop.engine.graph.pull import derivatives, pull_columns
from packprop.engine.graph.search import nodes_above
from packprop.engine.recording.marks import RecordedLoss
from packprop.engine.recording.switch import disable
from packprop.engine.samples.hidden_mixing import parts
from packprop.engine.tensors.dry import has_fault, is_dry_run
from packprop.engine.tensors.layout import Layout
from packprop.engine.tensors.precision import accumulation_dtype
from packprop.engine.tensors.repeated import one_by_one
from packprop.engine.tensors.state import version
from packprop.engine.tensors.traced import is_traced
from packprop.errors import PackpropError

GGN_ASKED = "A generalized Gauss-Newton quantity was asked for."
LOSSES_ASKED = "Losses of single samples were asked for."
MOST_ENTRIES = 2**24
"""The largest root of a user's rule, at one position, that packprop compares with second derivatives."""


def require_unchanged_input(call: RecordedLoss, asked: str) -> None:
    """Raise if the input of a loss has other values than when the loss was computed.

    Raises:
        PackpropError: If it was changed in place.
    """
    if version(call.input) != call.version:
        raise PackpropError(
            asked,
            f"the input of {call.name}, of shape {list(call.shape)}",
            "it was changed in place after the loss was computed",
            "clone it before changing it",
        )


def loss_factor(graph: Graph, loss: ReachedLoss) -> Tensor | None:
    """Return the factor on a loss: the gradient of the roots with respect to the output of the loss function.

    ``None`` stands for the factor 1 on a loss that is the root itself.

    Raises:
        PackpropError: If the loss enters nonlinearly or with a negative factor: its curvature is then not the
            curvature of the roots.
    """
    if _is_root(graph, loss):
        return None
    factor = linear_factor(graph, loss, GGN_ASKED)
    if has_fault((factor < 0).any()):
        raise PackpropError(
            GGN_ASKED,
            "what the loss was multiplied by",
            "a negative factor makes the matrix negative: it has no square root",
            "ask for the quantities of the loss itself, and change the sign of the result",
        )
    return factor


def _is_root(graph: Graph, loss: ReachedLoss) -> bool:
    """Tell whether a loss is what ``backward()`` was called on, without a factor."""
    return len(graph.roots) == 1 and graph.roots[0].grad_fn is loss.node and graph.gradients[0] is None


def linear_factor(graph: Graph, loss: ReachedLoss, asked: str) -> Tensor:
    """Return the factor as ``loss_factor`` does, of either sign; ``asked`` is the request that errors name.

    Raises:
        PackpropError: If the loss enters nonlinearly.
    """
    if _is_root(graph, loss):
        return torch.ones_like(graph.roots[0], requires_grad=False)
    edge = GradientEdge(loss.node, loss.output)
    gradients = graph.root_gradients()
    with torch.enable_grad():
        (factor,) = derivatives(graph.roots, [edge], gradients, create_graph=True)
        assert factor is not None
        curved: list[Tensor | None] = []
        if factor.requires_grad:  # random: along ones, a share of the total does not change
            generator = torch.Generator().manual_seed(0)
            noise = torch.rand(factor.shape, generator=generator, device="cpu").to(factor)
            ends = [each.value for each in graph.losses] + graph.open  # tensors that the factor may depend on
            curved = derivatives([factor], ends, [noise])
    if any(each is not None and has_fault((each != 0).any()) for each in curved):
        raise PackpropError(
            asked,
            "what was made of the loss after the loss function",
            "it is not linear in the loss, so that it curves by itself",
            "reduce and scale the loss linearly (sum, mean, weights), or give the whole of it as one loss "
            "module that calls no loss function of torch (x.logsumexp(1) and x.gather(...) in place of "
            "cross_entropy), so that the module is the loss",
        )
    return factor if torch.is_grad_enabled() else factor.detach()


def generic_root(loss: ReachedLoss, factor: Tensor | None) -> Root:
    """Return the root of a loss without a rule, from the second derivatives of each sample.

    packprop differentiates the graph that the loss was recorded in, which holds its random numbers and buffers.

    Raises:
        PackpropError: If the loss is not twice differentiable, or its Hessian couples samples.
    """
    call, layout, differentiable = loss.call, loss.layout, torch.is_grad_enabled()
    _require_twice_differentiable(loss)
    with torch.enable_grad():
        gradient = loss_gradient(loss, call.edge, factor)
        front = layout.to_front(gradient).reshape(layout.samples, -1)
        entries = front.shape[1]
        wide = accumulation_dtype(front.dtype)
        if not gradient.requires_grad:
            zeros = front.new_zeros(layout.samples, entries, entries, dtype=wide)
            return _rounded(matrix_root(zeros, front.dtype), front.dtype)

        def product(vector: Tensor) -> Tensor:
            try:
                given = [vector.expand_as(front)]
                (row,) = derivatives([front], [call.edge], given, create_graph=differentiable)
            except (RuntimeError, NotImplementedError) as error:
                raise PackpropError(
                    GGN_ASKED,
                    f"the loss {call.name}",
                    f"PyTorch cannot differentiate it twice: {error}",
                    "use a twice differentiable loss, or ask for first-order quantities",
                ) from error
            row = torch.zeros_like(gradient) if row is None else row
            return layout.to_front(row).reshape(layout.samples, -1)

        unit = torch.eye(entries, dtype=front.dtype, device=front.device)
        rows = one_by_one(entries, lambda entry: [product(unit[entry])])
        hessian = torch.stack([row for (row,) in rows if row is not None], 1).to(wide)
        if layout.samples > 1 and are_coupled([gradient], [call.edge], [layout]):
            raise PackpropError(
                GGN_ASKED,
                "the loss function",
                "its Hessian couples the outputs of different samples",
                "use a loss that is a sum or mean of one term for each sample",
            )
    return _rounded(matrix_root(0.5 * (hessian + hessian.mT), front.dtype), front.dtype)


def loss_gradient(loss: ReachedLoss, edge: GradientEdge, factor: Tensor | None) -> Tensor:
    """Return the gradient of a loss, times its factor, at an edge before it; with a graph in gradient mode."""
    (gradient,) = derivatives([loss.value], [edge], [factor], create_graph=torch.is_grad_enabled())
    assert gradient is not None
    return gradient


def _rounded(root: Root, dtype: torch.dtype) -> Root:
    """Return the same root with columns in the precision of the loss's input."""
    return Root(
        root.columns,
        lambda t, start, stop: root.position(t, start, stop).to(dtype),
        lambda draws, generator: root.draw(draws, generator).to(dtype),
    )


def loss_hessian_products(graph: Graph, loss: ReachedLoss) -> Callable[[Tensor], Tensor]:
    """Return the function from vectors ``[v, *f]`` at the entrance of a loss to products with its Hessian."""
    edge: Any = loss.entrance.edge
    with torch.no_grad():
        factor = loss_factor(graph, loss)
    _require_twice_differentiable(loss)
    with torch.enable_grad():
        gradient = loss_gradient(loss, edge, factor)

    def product(vectors: Tensor) -> Tensor:
        (found,) = vjps([gradient], [edge], [vectors])
        return torch.zeros_like(vectors) if found is None else found

    return product


def require_root(graph: Graph, loss: ReachedLoss, root: Root, scale: Tensor) -> None:
    """Raise if the root from a user's rule is not one of the loss's Hessian, at each sample's first position.

    packprop multiplies the root with its transpose, and compares the product with second derivatives of the
    graph that the loss was recorded in, once for each shape, axis of classes, divisor, and option of the loss.
    It does not check the rule of a loss with a backward pass of the user's own, which need not be
    differentiable, nor a root of more than ``MOST_ENTRIES`` entries.

    Args:
        graph: The graph of the pass.
        loss: The loss, whose rule gave the root.
        root: The root.
        scale: The factor on each term ``[n, t]`` that the rule got.

    Raises:
        PackpropError: If they differ.
    """
    call, entrance = loss.call, loss.entrance
    proven, rule = PROVEN.get(registered(call.function)), entrance.rule
    if proven is None or rules.trusted or is_dry_run() or is_traced():
        return
    case = (
        call.shape,
        rule.class_axis,
        None if isinstance(rule.divisor, Tensor) else rule.divisor,
        *_options_of(call),
    )
    if case in proven:
        return
    if not scale.numel() or any(is_from_outside(n) for n in nodes_above([loss.node], [entrance.edge.node])):
        return
    with torch.no_grad():
        columns = root.position(0, 0, root.columns)  # [k, n, c]
        if columns.numel() > MOST_ENTRIES:
            return
        vector = sines(columns[0])
        positions = columns.new_zeros(1, *scale.shape, columns.shape[-1])

        def placed(values: Tensor) -> Tensor:
            return entrance.put(
                call, loss.layout, rule.class_axis, positions.select_scatter(values[None], 2, 0)
            )

        found = placed(torch.einsum("knc,kn->nc", columns, (columns * vector).sum(-1)))
        try:
            expected = loss_hessian_products(graph, loss)(placed(vector))
        except (RuntimeError, NotImplementedError):  # there is nothing to compare the rule with
            return
        eps = torch.finfo(columns.dtype).eps
        # second derivatives of a loss that saturates are differences of numbers as large as the scale
        rounding = 100 * eps * scale.amax() * torch.linalg.vector_norm(vector)
        size = torch.linalg.vector_norm(expected) + torch.linalg.vector_norm(found)
        difference = torch.linalg.vector_norm(found - expected)
    if bool(difference > max(0.01, eps**0.5) * size + rounding):  # false for NaN
        raise PackpropError(
            GGN_ASKED,
            f"the rule that is registered for the loss {call.name}",
            "its root times its transpose is not the Hessian: second derivatives of the loss differ",
            "fix root, class_axis, weight or divisor; with root=None packprop takes second derivatives; "
            "packprop.testing.check_model(model, loss, inputs, targets) shows where a rule is wrong",
        )
    if bool(size.isfinite() & (size > 0)):
        proven.note(case)


def _options_of(call: RecordedLoss) -> list[Any]:
    """Return the options of a loss and of its module, and the shapes of tensors that it takes."""
    own = getattr(call.function, "module", None)
    modules = [] if own is None else [vars(each) for each in own.modules()]
    given = [*enumerate(call.args), *call.kwargs.items(), *(pair for each in modules for pair in each.items())]
    return [
        (name, *value.shape, value.dtype) if isinstance(value, Tensor) else (name, option_of(value))
        for name, value in given
    ]


def _require_twice_differentiable(loss: ReachedLoss) -> None:
    """Raise if a loss contains functions that are marked as once differentiable."""
    for node in nodes_above([loss.node], [loss.entrance.edge.node]):
        if is_once_differentiable(node):
            raise PackpropError(
                GGN_ASKED,
                f"{node.name()} in the loss {loss.call.name}",
                "its backward pass is marked once_differentiable: the loss has no second derivative",
                "write its backward pass in differentiable operations and drop the mark",
            )


def are_coupled(
    gradients: Sequence[Tensor | None], edges: Sequence[GradientEdge], layouts: Sequence[Layout]
) -> bool:
    """Tell whether gradients at some edges depend on other samples there: no sample then has its own curvature.

    For any two samples, one of the products separates them. A traced pass notes the answer as a fault.
    """
    curved = {p: each for p, each in enumerate(gradients) if each is not None and each.requires_grad}
    tolerance = min([1e-6, *(64 * torch.finfo(gradient.dtype).eps for gradient in curved.values())])
    found = []
    for fed in parts(layouts[0].samples, every=True) if curved else ():
        vectors = [sines(each) * layouts[p].broadcast(fed.to(each), each.dim()) for p, each in curved.items()]
        products = pull_columns([*curved.values()], edges, vectors, batched=False)
        for product, layout in zip(products, layouts, strict=True):
            if product is not None and product.numel():
                sizes = layout.to_front(product).reshape(layout.samples, -1).abs().amax(1)
                own = fed.to(sizes.device)
                found.append(sizes.where(~own, 0.0).amax() > tolerance * sizes.where(own, 0.0).amax())
    return any(map(has_fault, found))


def sines(like: Tensor) -> Tensor:
    """Return sines of different numbers, in a tensor's shape: they do not cancel, and need no random draws."""
    wide = accumulation_dtype(like.dtype.to_real())
    numbers = torch.arange(1, like.numel() + 1, dtype=wide, device=like.device)
    return numbers.sin().to(like.dtype).view(like.shape)


def sample_losses(graph: Graph) -> Tensor:
    """Return the terms of the loss, summed for each sample: ``[n]``, in at least float32.

    The terms include the weights of classes and terms, and the factor on the loss, but no divisor of a mean.

    Raises:
        PackpropError: If there is not exactly one recorded loss, it enters nonlinearly, its input was changed,
            or it does not return its terms.
    """
    if len(graph.losses) != 1:
        raise PackpropError(
            LOSSES_ASKED,
            f"a loss made of {len(graph.losses)} recorded loss functions",
            "packprop knows which terms belong to a sample only for a single loss function",
            "use one loss function of torch",
        )
    loss = graph.losses[0]
    call, name = loss.call, loss.call.name
    require_unchanged_input(call, LOSSES_ASKED)
    rule = describe(call.function, call.args, call.kwargs)
    layout, shape = without_classes(loss.layout, call.shape, rule.class_axis)
    factor = linear_factor(graph, loss, LOSSES_ASKED)
    terms: Tensor | None = None
    given = inspect.signature(call.function).bind(*call.args, **call.kwargs)
    if "reduction" in inspect.signature(call.function).parameters:
        given.arguments["reduction"] = "none"
        with torch.no_grad(), disable():
            terms = call.function(*given.args, **given.kwargs)
    if terms is None or terms.shape != shape:
        raise PackpropError(
            LOSSES_ASKED,
            f"the loss {name}",
            "it does not return a term for each sample and position with reduction='none'",
            "use a loss function of torch that does, or store losses by hand: StoreWriter.write(loss=...)",
        )
    front = layout.to_front(terms.to(accumulation_dtype(terms.dtype)) * factor)
    return front.reshape(len(front), -1).sum(1)
