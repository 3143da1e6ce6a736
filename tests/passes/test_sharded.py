"""Parameters that FSDP shards between processes have values, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import packprop
from packprop import extensions
from tests.distributed.processes import in_processes, needs_groups
from tests.selection import thorough

pytestmark = [
    needs_groups,
    pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="cannot shard on the CPU"),
]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3))


def sharded(layers: list[int], whole: bool, extend_first: bool = False) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, model = init_device_mesh("cpu", (1,)), network()
    if extend_first:
        packprop.extend(model)
    for place in layers:
        fully_shard(model[place], mesh=mesh)
    if whole:
        fully_shard(model, mesh=mesh)
    return packprop.extend(model)


def wrapped(original: bool, extend_inner: bool = False) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = packprop.extend(network()) if extend_inner else network()
    whole = FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))
    return whole if extend_inner else packprop.extend(whole)


def one_layer_extended() -> nn.Module:
    model = packprop.restore(sharded([], True))
    packprop.extend(model[2])
    return model


SHARDED: dict[str, Callable[[], nn.Module]] = {
    "whole": lambda: sharded([], True),
    "layers": lambda: sharded([0, 2], True),
    "one-layer": lambda: sharded([0], False),
    "extended-before": lambda: sharded([0, 2], True, True),
}
REFUSED: dict[str, Callable[[], nn.Module]] = {
    "one-layer-extended": one_layer_extended,
    "FSDP1": lambda: wrapped(False),
    "FSDP1-original": lambda: wrapped(True),
    "FSDP1-inner": lambda: wrapped(True, True),
}


def has_values(rank: int) -> None:
    for build in SHARDED.values():
        torch.manual_seed(0)
        model, loss_function = build(), packprop.extend(nn.CrossEntropyLoss())
        x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
        with packprop.backpack(extensions.BatchGrad()):
            loss_function(model(x), y).backward()
        torch.manual_seed(0)
        plain = packprop.extend(network())
        with packprop.backpack(extensions.BatchGrad()):
            loss_function(plain(x), y).backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad_batch, other.grad_batch)


@thorough
def test_sharded_parameters_have_values() -> None:
    in_processes(has_values, 1)


def are_refused(rank: int) -> None:
    for build in REFUSED.values():
        model, loss_function = build(), packprop.extend(nn.CrossEntropyLoss())
        loss = loss_function(model(torch.randn(6, 4)), torch.randint(0, 3, (6,)))
        named = r"FSDP2[\s\S]*DistributedDataParallel"
        with pytest.raises(packprop.PackpropError, match=named), packprop.backpack(extensions.BatchGrad()):
            loss.backward()
        loss.backward()  # the refused pass has changed nothing
        assert all(parameter.grad is not None for parameter in packprop.restore(model).parameters())


@thorough
def test_sharded_parameters_are_refused() -> None:
    in_processes(are_refused, 1)


def another_is_not(rank: int) -> None:
    sharded([], True)
    model, loss_function = packprop.extend(network()), packprop.extend(nn.CrossEntropyLoss())
    loss = loss_function(model(torch.randn(6, 4)), torch.randint(0, 3, (6,)))
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    assert model[0].weight.grad_batch.shape == (6, 5, 4)


@thorough
def test_other_models_are_not() -> None:
    in_processes(another_is_not, 1)
