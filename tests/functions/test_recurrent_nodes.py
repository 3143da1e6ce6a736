"""An LSTM in one node, as oneDNN has it: it has the values of an LSTM in plain functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import Node

import packprop
from packprop import extensions
from tests.selection import one_in

SAMPLES, STEPS, SIZE = 5, 3, 4
ASKED = (
    extensions.BatchGrad,
    extensions.BatchL2Grad,
    extensions.Variance,
    extensions.DiagGGNExact,
    extensions.KFLR,
)
VALUES = ("grad_batch", "batch_l2", "variance", "diag_ggn_exact", "kflr")


class Network(nn.Module):
    """An LSTM behind a linear layer, whose first state and memory may be trained.

    Args:
        taken: Which of its outputs are returned: all states, the last one, the last memory.
        time_first: Whether the layer takes steps before samples.
        trained: Whether what comes before the first step is trained.
        folded: Whether each sample is several sequences, in the rows of one batch.
        checkpointed: Whether the layer is in a checkpoint.
        options: Of the layer.
    """

    def __init__(
        self,
        taken: str = "ohc",
        *,
        time_first: bool = False,
        trained: bool = False,
        folded: bool = False,
        checkpointed: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.inner, self.layer = nn.Linear(3, 3), nn.LSTM(3, SIZE, batch_first=not time_first, **options)
        self.taken, self.time_first, self.folded, self.checkpointed = taken, time_first, folded, checkpointed
        count = self.layer.num_layers * (2 if self.layer.bidirectional else 1)
        self.first = nn.Parameter(torch.randn(2, count, 1, SIZE)) if trained else None

    def forward(self, x: Tensor) -> Tensor:
        samples = len(x)
        x = self.inner(x)
        x = x.flatten(0, 1) if self.folded else x
        x = x.transpose(0, 1) if self.time_first else x
        rows = x.shape[1 if self.time_first else 0]
        first = None
        if self.first is not None:
            first = tuple(each.expand(-1, rows, -1).contiguous() for each in self.first)
        if self.checkpointed:
            output, last = torch.utils.checkpoint.checkpoint(self.layer, x, first, use_reentrant=False)
        else:
            output, last = self.layer(x, first)
        found = {
            "o": output.transpose(0, 1) if self.time_first else output,
            "h": last[0].transpose(0, 1),
            "c": last[1].transpose(0, 1),
        }
        return torch.cat([found[letter].reshape(samples, -1) for letter in self.taken], 1)


NETWORKS: dict[str, dict[str, Any]] = {
    "all outputs": {},
    "all states": {"taken": "o"},
    "last state": {"taken": "h"},
    "last memory": {"taken": "c"},
    "time first": {"time_first": True},
    "without bias": {"bias": False},
    "trained first state": {"trained": True},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True, "trained": True},
    "several sequences": {"folded": True, "bidirectional": True},
    "several sequences, time first": {"folded": True, "time_first": True, "trained": True},
    "checkpoint": {"checkpointed": True},
}


def network_and_data(name: str) -> tuple[nn.Module, Tensor]:
    """A network and a batch for it."""
    options = NETWORKS[name]
    extents = (SAMPLES, 2, STEPS, 3) if options.get("folded") else (SAMPLES, STEPS, 3)
    return packprop.extend(Network(**options)), torch.randn(extents)


def nodes_of(tensor: Tensor) -> set[Node]:
    """All nodes that a tensor was computed by."""
    found: set[Node] = set()
    stack = [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.add(node)
            stack += [above for above, _ in node.next_functions]
    return found


def values_of(model: nn.Module, x: Tensor, fused: bool) -> dict[str, Any]:
    """Everything that is asked for, in single precision, with or without the node of oneDNN's."""
    loss = packprop.extend(nn.MSELoss(reduction="sum"))
    with torch.backends.mkldnn.flags(enabled=fused):
        output = model(x)
        assert any("MkldnnRnnLayer" in node.name() for node in nodes_of(output)) == fused
        with packprop.backpack(*(make() for make in ASKED)):
            loss(output, torch.ones_like(output)).backward()
    return {
        f"{name}: {value}": getattr(parameter, value)
        for name, parameter in model.named_parameters()
        for value in VALUES
    }


@one_in(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_values_are_those_of_the_plain_functions(name: str) -> None:
    """Rows, norms, diagonals and factors agree with those of an LSTM that is many nodes."""
    model, x = network_and_data(name)
    fused, plain = values_of(model, x, True), values_of(model, x, False)
    for key, value in plain.items():
        torch.testing.assert_close(
            fused[key], value, rtol=1e-3, atol=1e-4, msg=lambda said, key=key: f"{key}: {said}"
        )


@one_in(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_values_are_differentiable(name: str) -> None:
    """A penalty on norms has the gradient that it has for an LSTM that is many nodes."""
    model, x = network_and_data(name)
    loss, found = packprop.extend(nn.MSELoss(reduction="sum")), []
    for fused in (True, False):
        with torch.backends.mkldnn.flags(enabled=fused):
            output = model(x)
            with packprop.backpack(extensions.BatchL2Grad()):
                loss(output, torch.ones_like(output)).backward(create_graph=True)
            norms = torch.stack([parameter.batch_l2 for parameter in model.parameters()]).sum()
            found.append(torch.autograd.grad(norms, list(model.parameters())))
        for parameter in model.parameters():
            parameter.grad = None
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


def test_autocast() -> None:
    """Rows of a layer in half precision add up to its gradient."""
    model, x = network_and_data("all outputs")
    loss = packprop.extend(nn.MSELoss(reduction="sum"))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
        value = loss(output.float(), torch.ones(output.shape))
    with packprop.backpack(extensions.BatchGrad()):
        value.backward()
    for name, parameter in model.named_parameters():
        rows = parameter.grad_batch
        assert rows.dtype == torch.float32
        torch.testing.assert_close(rows.sum(0), parameter.grad, rtol=0.05, atol=0.05, msg=name)


@pytest.mark.parametrize("samples", [2, 16])
def test_the_node_is_not_called_for_each_sample(samples: int) -> None:
    """The user's pass calls the node once; nothing else does, once it is known where the samples are."""
    model, loss = packprop.extend(Network("o")), packprop.extend(nn.MSELoss())
    for _ in range(2):
        output = model(torch.randn(samples, STEPS, 3))
        (node,) = (node for node in nodes_of(output) if "MkldnnRnnLayer" in node.name())
        calls: list[int] = []
        node.register_prehook(lambda _, calls=calls: calls.append(1))
        with packprop.backpack(extensions.BatchGrad()):
            loss(output, torch.zeros_like(output)).backward()
    assert len(calls) == 1
