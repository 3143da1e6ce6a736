"""Whether an entry of a tensor that was computed from the model's output depends on more than one sample."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.graph.pull import pull_columns
from packprop.graph.sweep import unmasked
from packprop.graph.traversal import made_by
from packprop.samples.hidden_mixing import parts
from packprop.samples.separation import ModelOutput, by_sample, ones_at
from packprop.tensors.layout import Layout, possible_layouts


def entries_join(
    edge: GradientEdge, ends: Sequence[ModelOutput], layouts: Sequence[Layout], samples: int
) -> bool:
    """Whether some entry of a tensor depends on more than one sample, for some values.

    Each entry's derivative along NaN in the rows of some samples is NaN if it depends on one of them. Each
    sample is fed NaN in half of the sweeps, no two in the same ones: an entry of one sample comes back as NaN
    in half of them, one of several samples in more. Where PyTorch has no such derivative, entries of single
    samples are known by an axis that holds the samples.

    Args:
        edge: Where the tensor came from.
        ends: The values that hold the samples.
        layouts: Where they hold them.
        samples: Number of samples.
    """
    if any(layout.axis is None for layout in layouts):
        return _is_reached(edge, ends, layouts)
    made = made_by(edge.node)[edge.output_nr]
    cotangent = torch.ones(made.shape, dtype=made.dtype, device=made.device, requires_grad=True)
    ones = ones_at(ends)
    sweeps = parts(samples, every=True)
    count = torch.zeros(made.shape, dtype=torch.int64, device=made.device)
    try:
        with torch.enable_grad(), unmasked([edge]):
            products = pull_columns(
                [edge], [end.edge for end in ends], [cotangent], batched=False, create_graph=True
            )
        reached = [p for p, product in enumerate(products) if product is not None and product.requires_grad]
        if not reached:
            return False
        for fed in sweeps:
            vectors = by_sample(ones, layouts, torch.where(fed, torch.nan, 0.0))
            with torch.autograd.set_detect_anomaly(False):
                (along,) = pull_columns(
                    [products[p] for p in reached], [cotangent], [vectors[p] for p in reached], batched=False
                )
            if along is not None:
                count += along.isnan()
    except (RuntimeError, NotImplementedError):
        return not _has_samples_on_an_axis(edge, ends, layouts, samples)
    return bool((count > len(sweeps) // 2).any())


def _is_reached(edge: GradientEdge, ends: Sequence[ModelOutput], layouts: Sequence[Layout]) -> bool:
    """Whether a tensor depends on a value that belongs to the whole batch."""
    made = made_by(edge.node)[edge.output_nr]
    ones = torch.ones(made.shape, dtype=made.dtype, device=made.device)
    whole = [end.edge for end, layout in zip(ends, layouts, strict=True) if layout.axis is None]
    return any(product is not None for product in pull_columns([edge], whole, [ones], batched=False))


def _has_samples_on_an_axis(
    edge: GradientEdge, ends: Sequence[ModelOutput], layouts: Sequence[Layout], samples: int
) -> bool:
    stand_in, sweeps = ModelOutput.at(edge), parts(samples, every=True)
    for own in possible_layouts(stand_in.shape, samples):
        seeds = [by_sample(ones_at([stand_in]), [own], fed) for fed in sweeps]
        if all(map(functools.partial(_comes_back_apart, edge, ends, layouts), seeds, sweeps)):
            return True
    return False


def _comes_back_apart(
    edge: GradientEdge,
    ends: Sequence[ModelOutput],
    layouts: Sequence[Layout],
    seeds: Sequence[Tensor],
    fed: Tensor,
) -> bool:
    """Whether nothing comes back in the rows of samples that were fed zeros."""
    products = pull_columns([edge], [end.edge for end in ends], seeds, batched=False)
    return not any(
        bool((layout.to_front(product)[~fed.to(product.device)] != 0).any())
        for product, layout in zip(products, layouts, strict=True)
        if product is not None
    )
