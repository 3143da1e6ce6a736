"""Whether what was computed from the model's output is a sum of one term for each sample.

# NOTE [Mixing in the loss]
Rows of a gradient belong to samples only if the gradient in one sample's output does not depend on the outputs
of others: then the loss is a sum of terms. So the gradient at the model's output is differentiated again, along
random numbers in the rows of some samples, and must be zero in the rows of the others. Only the graph of the
loss is gone through. Losses that torch has a rule for are known to be sums. As for the model, what is found is
kept if NaN instead of the numbers finds no dependence either; see NOTE [Hidden mixing]. A loss that is not
twice differentiable, or couples samples by kinks alone, is not seen through.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.errors import PackpropError
from packprop.functions.losses import LOSSES
from packprop.graph.graph import Graph
from packprop.graph.hidden_mixing import parts
from packprop.graph.pull import pull_columns
from packprop.graph.separation import ModelOutput, by_sample
from packprop.tensors.layout import Layout


def require_separate_losses(graph: Graph, outputs: Sequence[ModelOutput], chosen: Sequence[Layout]) -> bool:
    """Refuse losses that mix samples; see NOTE [Mixing in the loss].

    Args:
        graph: What the pass goes through.
        outputs: The model's outputs.
        chosen: Where each of them holds the samples.

    Returns:
        Whether this holds for all values.
    """
    lasting = True
    closed = sum(output.decides for output in outputs) if graph.losses else 0
    unseen = [place for place, loss in enumerate(graph.losses) if loss.is_open]
    unseen += range(closed, len(outputs))
    if unseen:
        roots = [torch.autograd.graph.get_gradient_edge(root) for root in graph.roots]
        seeds = graph.root_gradients()
        name = "what was computed from the model's output"
        own, where = [outputs[place] for place in unseen], [chosen[place] for place in unseen]
        lasting = _is_separate(graph.asked, name, roots, seeds, own, where)
    for loss, output, layout in zip(graph.losses, outputs, chosen, strict=False):  # those of losses come first
        function = loss.call.function
        if function in LOSSES:
            continue
        name = f"the loss {getattr(function, '__name__', function)}"
        value = GradientEdge(loss.node, loss.output)
        one = torch.ones((), dtype=output.dtype, device=output.device)
        lasting &= _is_separate(graph.asked, name, [value], [one], [output], [layout])
    return lasting


def _is_separate(
    asked: str,
    name: str,
    roots: Sequence[GradientEdge],
    seeds: Sequence[Tensor],
    outputs: Sequence[ModelOutput],
    chosen: Sequence[Layout],
) -> bool:
    """Whether a loss is a sum over samples for all values; refused if it is none for the present ones."""
    edges, samples = [output.edge for output in outputs], chosen[0].samples
    generator = torch.Generator().manual_seed(samples)
    try:
        with torch.enable_grad():
            gradients = pull_columns(roots, edges, seeds, batched=False, create_graph=True)
    except (RuntimeError, NotImplementedError):
        return True
    places = [place for place, given in enumerate(gradients) if given is not None and given.requires_grad]
    curved = [gradient for gradient in gradients if gradient is not None and gradient.requires_grad]
    if not curved:
        return True
    noise = [torch.randn(output.shape, generator=generator) for output in outputs]
    lasting = True
    for fed in parts(samples, every=False):
        for factors in (fed.double(), torch.where(fed, torch.nan, 0.0)):
            vectors = by_sample(outputs, chosen, noise, factors)
            try:
                with torch.autograd.set_detect_anomaly(False):
                    products = pull_columns(curved, edges, [vectors[p] for p in places], batched=False)
            except (RuntimeError, NotImplementedError):
                return lasting
            for product, layout in zip(products, chosen, strict=True):
                if product is None:
                    continue
                rows = layout.to_front(product.detach())
                other, own = rows[~fed.to(rows.device)].abs(), rows[fed.to(rows.device)].abs()
                if bool(other.isnan().any()):
                    lasting = False
                elif bool(other.amax() > 16 * torch.finfo(other.dtype).eps * own.nan_to_num(0.0).amax()):
                    raise _mixed(asked, name)
    return lasting


def _mixed(asked: str, name: str) -> PackpropError:
    return PackpropError(
        asked,
        name,
        "it mixes the samples: the gradient in the output of one sample depends on the outputs of others, so "
        "that no row belongs to one sample",
        "use a loss that is a sum or mean of one term for each sample, and bend or normalise no sum of them",
    )
