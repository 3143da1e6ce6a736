"""Forward passes inside of transforms of ``torch.func``, such as ``vmap``, which are not recorded."""

from __future__ import annotations

from torch import Tensor
from torch._C import _functorch
from torch.autograd.graph import Node

from packprop.errors import PackpropError


def node_under_transforms(tensor: Tensor) -> Node | None:
    """The node of the graph outside of all transforms that made what a tensor inside of some stands for.

    Nothing public tells what a transform wraps, and its tensors say of themselves that they need no gradient.
    """
    if not _functorch.is_functorch_wrapped_tensor(tensor):
        return None
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor.grad_fn


def refused(what: str) -> PackpropError:
    """The error for a pass that would have to go through a transform."""
    return PackpropError(
        "A quantity beyond the gradient was asked for.",
        what,
        "its forward pass ran inside a transform of torch.func (vmap, as for ensembles, or grad), whose "
        "tensors stand for others: no use of a parameter can be recorded there",
        "call the members of an ensemble one after the other, without vmap, each a model that is extended",
    )
