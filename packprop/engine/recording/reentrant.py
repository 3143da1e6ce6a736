"""Reentrant checkpoints: one node each, whose own graph is there only while the node runs.

# NOTE [Reentrant checkpoints]
Autograd does not record the forward pass of a reentrant checkpoint, so nothing in it can be found from the
loss, and its backward pass refuses to be part of ``torch.autograd.grad``. During a pass of packprop both are
worked around: the checkpoint's function is run again, as its node would do it. It is run
once when the graph is walked, to see what is in it, and again each time that a sweep comes through the node,
which then sweeps the graph that was just made. No tensor of that graph is kept from one run to the next.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.checkpoint import detach_variable, set_device_states

from packprop.errors import FreedGraph, PackpropError

FIELDS = frozenset(
    {"run_function", "inputs", "tensor_indices", "preserve_rng_state", "device_type", "cpu_autocast_kwargs"}
)
"""Attributes in which the node of ``torch.utils.checkpoint`` keeps what its backward pass needs."""


NAME = "CheckpointFunctionBackward"
"""Name of that node."""


OTHER_KIND = (
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False); a model of Hugging Face: "
    "gradient_checkpointing_enable({'use_reentrant': False})"
)
"""The advice where this kind does not work, in messages."""


@dataclass(frozen=True)
class Rerun:
    """A checkpoint's function that was run again.

    Args:
        inputs: What it was given; tensors are leaves of a new graph.
        outputs: What it returned, one for each output of the node; ``None`` for what is no tensor.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Tensor | None, ...]

    def gradients(self, by_input: dict[int, Tensor | None]) -> tuple[Tensor | None, ...]:
        """The values that the node returns, from the gradients of its inputs by ``id``."""
        own = [by_input.get(id(value)) if isinstance(value, Tensor) else None for value in self.inputs]
        return (None, None, *own)  # its first arguments are the function, and whether to keep the random state


def is_reentrant(node: Node) -> bool:
    """Tell whether a node is a reentrant checkpoint.

    Raises:
        PackpropError: If it is one, but not PyTorch's own, so that it is not known how to run it again.
    """
    if node.name() != NAME:
        return False
    if all(hasattr(node, name) for name in FIELDS):
        return True
    raise refused("this kind of checkpoint hides the layers inside from this pass")


def refused(why: str) -> PackpropError:
    """The error for what a reentrant checkpoint makes impossible."""
    return PackpropError(
        "A quantity beyond the gradient was asked for.",
        "a part of the model inside torch.utils.checkpoint",
        why,
        OTHER_KIND,
    )


def run_again(node: Any) -> Rerun:
    """Run a checkpoint's function as its node does, with gradients."""
    inputs = list(node.inputs)
    try:
        saved = node.saved_tensors
    except RuntimeError as error:
        raise FreedGraph(
            "A second backward pass through one graph was asked for.",
            "the loss that backward() was called on",
            "the first pass freed the graph, and the inputs of its checkpoints",
            "pass retain_graph=True to the first backward()",
        ) from error
    for place, tensor in zip(node.tensor_indices, saved, strict=True):
        inputs[place] = tensor
    preserved, devices = node.preserve_rng_state, []
    if preserved and node.had_device_in_fwd:
        devices = node.fwd_devices
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices, enabled=preserved, device_type=node.device_type))
        if preserved:
            torch.set_rng_state(node.fwd_cpu_state)
            if devices:
                set_device_states(devices, node.fwd_device_states, device_type=node.device_type)
        leaves = detach_variable(tuple(inputs))
        stack.enter_context(torch.enable_grad())
        if node.device_autocast_kwargs is not None:
            stack.enter_context(torch.autocast(node.device_type, **node.device_autocast_kwargs))
        stack.enter_context(torch.autocast("cpu", **node.cpu_autocast_kwargs))
        outputs = node.run_function(*leaves)
    values = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    return Rerun(leaves, tuple(value if isinstance(value, Tensor) else None for value in values))


def differs(where: str, why: str) -> PackpropError:
    """The error for a checkpoint that does something else when it is run again."""
    return refused(f"{where} in it was run again, and {why} than the first time")
