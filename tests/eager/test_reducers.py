"""Reducers of distributed training see the parameters of a branch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from packprop.engine.eager import eager_backward
from tests.distributed.processes import in_processes, needs_groups
from tests.eager.branches import Layer, assert_same, network
from tests.selection import thorough


class Sharded(nn.Module):
    """Layers with a critic each, which only the penalty uses."""

    def __init__(self, evaluate: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(evaluate) for _ in range(3))
        for layer in self.layers:
            layer.penalty = lambda x, critic=layer.critic: critic(x).exp().sum()

    def forward(self, x: Tensor) -> Tensor:
        loss = torch.zeros((), dtype=x.dtype)
        for layer in self.layers:
            x, penalty = layer(x)
            loss = loss + 0.7 * penalty
        return loss + x.sum()


def reduced_gradients(kind: str, evaluate: Callable[..., Tensor], rank: int) -> list[Tensor]:
    """The gradients that a reducer leaves after two steps on data that differ between ranks."""
    model: nn.Module = Sharded(evaluate)
    parameters = list(model.parameters())
    if kind == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for layer in model.layers:
            if kind == "FSDP2, critics too":
                fully_shard(layer.critic, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        parameters = list(model.parameters())
    for _ in range(2):
        model.zero_grad()
        model(network(rank + 7)[1].detach()).backward()
    found = [parameter.grad for parameter in parameters]
    return [getattr(grad, "full_tensor", lambda grad=grad: grad)() for grad in found]


def compare_reducers(rank: int) -> None:
    # Older versions of PyTorch cannot shard on the CPU.
    sharding = hasattr(torch.cpu.Stream, "record_event")
    for kind in ("DDP", "FSDP2", "FSDP2, critics too") if sharding else ("DDP",):
        plain = reduced_gradients(kind, lambda fn, x: fn(x), rank)
        for keep in ("exact", "recompute"):
            ours = reduced_gradients(kind, functools.partial(eager_backward, keep=keep), rank)
            assert len(ours) == 12
            assert_same(ours, plain)


@thorough
@needs_groups
def test_reducers_see_parameters_of_the_branch() -> None:
    in_processes(compare_reducers, 2)
