"""Forward passes inside of transforms of ``torch.func``, such as ``vmap``, which are not recorded."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import Node

from packprop.errors import PackpropError


def node_under_transforms(tensor: Tensor) -> Node | None:
    """The node of the graph outside of all transforms that made what a tensor inside of some stands for.

    Its tensors say of themselves that they need no gradient. PyTorch 2.6 has no name for what they stand
    for: there a pass finds no use, and warns of that.
    """
    if _unwrap is None:
        return None
    stands_for: Tensor = _unwrap(tensor)
    return None if stands_for is tensor else stands_for.grad_fn


_unwrap = getattr(torch.func, "debug_unwrap", None)


def refused(what: str) -> PackpropError:
    """The error for a pass that would have to go through a transform."""
    return PackpropError(
        "A quantity beyond the gradient was asked for.",
        what,
        "its forward pass ran inside a transform of torch.func (vmap, as for ensembles, or grad), whose "
        "tensors stand for others: no use of a parameter can be recorded there",
        "call the members of an ensemble one after the other, without vmap, each a model that is extended",
    )
