"""The search for a function whose second derivative is not finite, after a result that is not.

PyTorch's second derivatives are NaN where a formula divides by zero: a norm or a standard deviation at zero,
``sinc`` at zero. Often the function has a second derivative there, or one would take it to be zero. PyTorch
returns NaN, so the result is NaN, and packprop warns with the name of the function.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from packprop.engine.curvature.linear import noise_like
from packprop.engine.graph.graph import Graph
from packprop.engine.graph.pull import derivatives
from packprop.engine.graph.search import nodes_above
from packprop.engine.tensors.dry import is_dry_run
from packprop.engine.tensors.finite import are_finite
from packprop.errors import PackpropWarning


def faulty_node(
    outputs: Sequence[Any], seeds: Sequence[Tensor | None], inputs: Sequence[Any], ends: Sequence[Any]
) -> Node | None:
    """Return the node whose second derivative is not finite although its incoming cotangents are.

    Args:
        outputs: Tensors or edges to differentiate twice.
        seeds: Their seed vectors.
        inputs: The inputs of the first derivative.
        ends: The inputs of the second derivative: the same, or the seeds.

    Returns:
        ``None`` if there is no such node, because an earlier tensor is not finite.
    """
    starts = [output.grad_fn if isinstance(output, Tensor) else output.node for output in outputs]
    forward = list(nodes_above(starts))
    made_by: dict[Node, Node] = dict(zip(forward, forward, strict=True))

    def note_made(node: Node) -> Callable[..., None]:
        def note(products: Sequence[Tensor | None], _: Any) -> None:
            stack = [product.grad_fn for product in products if product is not None]
            while stack:
                above = stack.pop()
                if above is not None and above not in made_by:
                    made_by[above] = node
                    stack += [further for further, _ in above.next_functions]

        return note

    handles = [node.register_hook(note_made(node)) for node in forward]
    try:
        with torch.enable_grad():
            first = derivatives(outputs, inputs, seeds, create_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    if not are_finite(first):
        return None
    curved = [gradient for gradient in first if gradient is not None and gradient.requires_grad]
    found: list[Node] = []

    def look_at(node: Node) -> Callable[..., None]:
        def look(products: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
            if not found and are_finite(given) and not are_finite(products):
                found.append(made_by.get(node, node))

        return look

    above = list(nodes_above(gradient.grad_fn for gradient in curved))
    handles = [node.register_hook(look_at(node)) for node in above if "AccumulateGrad" not in node.name()]
    try:
        if curved:
            derivatives(curved, ends, [torch.ones_like(gradient) for gradient in curved])
    except RuntimeError:  # the faulty product was computed in another way
        return None
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def faulty_jacobian(outputs: Sequence[Any], inputs: Sequence[Any]) -> Node | None:
    """Search like ``faulty_node``, for first derivatives differentiated only in their seeds, as for ``J v``."""
    seeds = [tensor.requires_grad_() for tensor in noise_like(outputs)]
    return faulty_node(outputs, seeds, inputs, seeds)


def cause_of(what: str, node: Node, graph: Graph | None = None) -> str:
    """Return the text of a warning about a node whose second derivative is not finite."""
    near = ""
    if graph is not None:
        uses = {above: use for use in graph.uses for above, _ in use.nodes.values()}
        use = next((uses[above] for above in nodes_above([node]) if above in uses), None)
        near = "" if use is None else f", behind {graph.label(use)},"
    return (
        f"{what} holds NaN or infinite values: PyTorch's second derivative of {node.name()}{near} is not "
        "finite at the values of this pass. Norms, standard deviations and roots are such functions where they "
        "are zero: keep them away from it (add a small number inside)."
    )


def cause_in(graph: Graph, what: str) -> str:
    """Search between the losses and the uses of a graph, and return the text of ``cause_of``.

    The text is empty if no second derivative is the cause.
    """
    edges = [GradientEdge(*key) for use in graph.uses for key in use.nodes.values()]
    node = faulty_node(graph.roots, graph.root_gradients(), edges, edges)
    return "" if node is None else cause_of(what, node, graph)


def warn_unless_finite(
    what: str,
    products: Sequence[Tensor | None],
    vectors: Sequence[Tensor],
    search: Callable[[], Node | None],
    graph: Graph | None = None,
) -> None:
    """Warn of a product that is not finite, and name the function; wait for the device.

    Args:
        what: Name of the product, for the message.
        products: The product.
        vectors: The vectors; there is no warning if they are not finite.
        search: Finds the node, if there is one.
        graph: The graph, if the message shall name a layer nearby.
    """
    if is_dry_run() or are_finite(products) or not are_finite(vectors):
        return
    node = search()
    text = f"{what} holds NaN or infinite values." if node is None else cause_of(what, node, graph)
    warnings.warn(text, PackpropWarning, stacklevel=3)
