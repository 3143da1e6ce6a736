"""Second derivatives: errors that name a function for which PyTorch has none, or a wrong one.

PyTorch's second derivatives are NaN where a formula divides by zero: a norm or a standard deviation at zero,
``sinc`` at zero. Often the function has a second derivative there, or zero would be a sensible value. PyTorch
returns NaN, so the result is NaN, and packprop warns with the name of the function.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.checkpoint import CheckpointError

from packprop.engine.curvature.linear import noise_like
from packprop.engine.functions.nodes import (
    bias_without_weight,
    is_once_differentiable,
    is_without_second_derivative,
    is_wrong_in_second_order,
)
from packprop.engine.graph.graph import Graph, ReachedLoss
from packprop.engine.graph.own_backward import require_linear_backward, starts_of
from packprop.engine.graph.pull import derivatives, pull_columns
from packprop.engine.graph.search import nodes_above
from packprop.engine.recording.unrecorded import NOT_REENTRANT, REENTRANT
from packprop.engine.tensors.autocast import AutocastRegions
from packprop.engine.tensors.dry import are_finite, is_dry_run
from packprop.errors import PackpropError, PackpropWarning

ASKED = "A diagonal of the Hessian was asked for."


NOT_TWICE = re.compile(
    r"not implemented|not (currently )?support|once_differentiable|support automatic differentiation",
    re.IGNORECASE,
)
"""Messages of PyTorch for a missing second derivative; its other errors have other causes."""


ONCE = (
    "its backward pass is marked once_differentiable: it has no second derivative",
    "write its backward pass in differentiable operations and drop the mark, or ask for diagonals of the GGN",
)


CHUNKED = (
    "linear_cross_entropy with options has no second derivative: PyTorch takes it for zero, without any error",
    "call it with options=None, or call F.linear and F.cross_entropy on chunks of tokens",
)


WRONG = (
    "PyTorch differentiates it twice, but wrongly: its second derivatives are not symmetric",
    "normalise the weight by operations of your own (g * v / v.norm(...)), drop scale_grad_by_freq of tables; "
    "or ask for GGN quantities",
)


NO_WEIGHT = (
    "it has a bias and no weight: PyTorch's second derivative of it leaves out the bias",
    "give the normalisation a weight of ones, or add the bias behind it",
)


CHECKPOINT = (
    "torch.utils.checkpoint ran a part of the model again and got other tensors than in the forward pass: "
    "attention chose another kernel, or the call is inside another context (autocast)",
    "give a function that computes the loss, or make forward pass and call inside the same contexts; for "
    "attention, inside `with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):`",
)


CHANGED = (
    "inputs or other tensors of the forward pass were changed in place: its derivatives are gone",
    "run the forward pass again, on a clone of what you change in place",
)


HIDING_LAYERS = (
    "PyTorch goes through reentrant checkpoints only in backward(), and only once: they would count as zero",
    NOT_REENTRANT,
)


ADVICE = {
    "embedding_bag": (
        "use nn.Embedding with .sum(1), .mean(1) or .amax(1) behind it in place of nn.EmbeddingBag "
        "(padded, with padding_idx, where bags differ in size); or ask for diagonals or Kronecker "
        "factors of the GGN, which take no second derivative"
    ),
    "out=": (
        "write the backward pass of the torch.autograd.Function in operations without out=...; or replace it "
        "by functions of torch; or ask for GGN quantities"
    ),
    "_rnn": (
        "run the forward pass inside `with torch.backends.cudnn.flags(enabled=False):`: the layer consists "
        "of plain functions then; or ask for diagonals or Kronecker factors of the GGN"
    ),
    "flash|efficient|attention|cudnn": (
        "run the forward pass (with torch.utils.checkpoint also the backward pass) inside "
        "`with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):`: the fused kernels of "
        "scaled_dot_product_attention have no second derivative"
    ),
}
"""The advice by pattern, for PyTorch's messages about second derivatives of fused kernels and the like."""


@contextlib.contextmanager
def differentiating_twice(
    where: str,
    asked: str = ASKED,
    instead: str = "use functions that are twice differentiable, or ask for GGN quantities",
) -> Iterator[None]:
    """Turn PyTorch's errors about second derivatives, raised inside the context, into errors of four parts.

    Raises:
        PackpropError: With the name of PyTorch's function.
    """
    try:
        # inference mode would leave derivatives out of the graph in silence, and autocast would round them
        with torch.inference_mode(False), AutocastRegions.now().switched(False):
            yield
    except PackpropError:
        raise
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        if "a second time" in said:
            kept = "keep it there by backward(retain_graph=True), or run the forward pass again"
            raise PackpropError(asked, where, "another backward pass has freed the graph", kept) from error
        if isinstance(error, CheckpointError):
            raise PackpropError(asked, where, *CHECKPOINT) from error
        if "use_reentrant" in said:
            raise PackpropError(asked, where, *HIDING_LAYERS) from error
        if "inplace operation" in said:
            raise PackpropError(asked, where, *CHANGED) from error
        if not NOT_TWICE.search(said):
            raise
        why = f"PyTorch cannot differentiate a function there twice: {said}"
        advice = next((text for named, text in ADVICE.items() if re.search(named, said)), instead)
        raise PackpropError(asked, where, why, advice) from error


def require_second_derivatives(
    roots: Iterable[Tensor],
    leaves: Sequence[Tensor],
    name: Callable[[Tensor], str],
    asked: str = ASKED,
    linear: bool = False,
) -> None:
    """Raise if PyTorch has no second derivative, or a wrong one, of a function between roots and leaves.

    Args:
        roots: The roots of the graph.
        leaves: Tensors in which the roots are differentiated twice.
        name: Maps a leaf to its name, for the message.
        asked: The request, for the message.
        linear: Whether first derivatives are differentiated only in vectors in which they are linear, as for
            ``J v``.

    Raises:
        PackpropError: With the name of the node.
    """
    roots = list(roots)
    require_passable(roots, asked)
    wanted = {id(leaf): leaf for leaf in leaves}
    made = {leaf.grad_fn: leaf for leaf in leaves if leaf.grad_fn is not None}
    for node in nodes_above(root.grad_fn for root in roots):
        fault = ONCE if is_once_differentiable(node) else None
        if is_without_second_derivative(node):
            fault = CHUNKED
        if not linear and is_wrong_in_second_order(node):
            fault = WRONG
        start = node
        if fault is None and (bias := bias_without_weight(node)) is not None:
            fault, start = NO_WEIGHT, bias
        if fault is None:
            continue
        for above in nodes_above([start]):
            leaf = wanted.get(id(getattr(above, "variable", None)), made.get(above))
            if leaf is not None:
                raise PackpropError(asked, f"{node.name()}, between the loss and {name(leaf)}", *fault)


def require_passable(outputs: Sequence[Tensor | GradientEdge], asked: str) -> None:
    """Raise if a graph has no VJP: for reentrant checkpoints, and for backward functions that are not linear.

    Raises:
        PackpropError: With the name of the function.
    """
    if any(node.name() == REENTRANT for node in nodes_above(starts_of(outputs))):
        raise PackpropError(asked, "a part of the model inside torch.utils.checkpoint", *HIDING_LAYERS)
    require_linear_backward(asked, starts_of(outputs))


def named(graph: Graph) -> Callable[[Tensor], str]:
    """Return the function from a leaf to its name in messages."""
    return lambda leaf: f"parameter {graph.name(leaf)!r}"


def in_order(losses: Sequence[ReachedLoss]) -> list[ReachedLoss]:
    """Return losses in the order of their calls: each may take some of the positions."""
    return sorted(losses, key=lambda loss: loss.call.number)


def factors_on_losses(graph: Graph) -> list[tuple[ReachedLoss, Tensor]]:
    """Return the losses in the order of their calls, each with its factor.

    The factor is the gradient of the roots with respect to the value of the loss function, and has its shape.
    """
    losses = in_order(graph.losses)
    if all(any(root.grad_fn is loss.node for root in graph.roots) for loss in losses):
        seeds = {root.grad_fn: seed for root, seed in zip(graph.roots, graph.root_gradients(), strict=True)}
        return [(loss, seeds[loss.node]) for loss in losses]
    with graph.hooks.quiet():
        found = gradients_at(graph, [loss.value for loss in losses])
    return [
        (loss, torch.zeros((), device="cpu") if each is None else each)
        for loss, each in zip(losses, found, strict=True)
    ]


def gradients_at(graph: Graph, ends: Sequence[Any], create_graph: bool = False) -> list[Tensor | None]:
    """Return gradients of the roots at tensors or edges, dense even where PyTorch's are sparse."""
    return pull_columns(graph.roots, ends, graph.root_gradients(), batched=False, create_graph=create_graph)


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
    with torch.autograd.set_detect_anomaly(True, check_nan=False), torch.enable_grad():  # keeps parents
        first = derivatives(outputs, inputs, seeds, create_graph=True)
    curved = [gradient for gradient in first if gradient is not None and gradient.requires_grad]
    if not curved or not are_finite(first):
        return None
    found: list[Node] = []

    def look_at(node: Any) -> Callable[..., None]:
        def look(products: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
            if not found and are_finite(given) and not are_finite(products):
                found.append(node.metadata.get("parent_", node))

        return look

    above = [node for node in nodes_above(each.grad_fn for each in curved) if not hasattr(node, "variable")]
    handles = [node.register_hook(look_at(node)) for node in above]
    try:
        derivatives(curved, ends, [torch.ones_like(gradient) for gradient in curved])
    except RuntimeError:  # the faulty product came about in another way
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
        "finite at the values of this pass. This happens to norms, standard deviations and roots that are "
        "zero: keep them away from zero (add a small number inside)."
    )


def cause_in(graph: Graph, what: str) -> str:
    """Return the text of ``cause_of`` for a node between the losses and the uses of a graph.

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
