"""Parameters that FSDP shards between processes are refused by name, however the model was extended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import packprop
from packprop import extensions

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
    pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="cannot shard on the CPU"),
    pytest.mark.usefixtures("_process_group"),
    pytest.mark.filterwarnings("ignore:FSDP.* switch"),
]


@pytest.fixture
def _process_group(tmp_path: Path) -> Iterator[None]:
    built_by = f"file://{tmp_path / 'rendezvous'}"
    torch.distributed.init_process_group("gloo", init_method=built_by, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


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


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: sharded([], True), id="whole"),
        pytest.param(lambda: sharded([0, 2], True), id="layers"),
        pytest.param(lambda: sharded([0], False), id="one-layer"),
        pytest.param(lambda: sharded([0, 2], True, True), id="extended-before"),
        pytest.param(one_layer_extended, id="one-layer-extended"),
        pytest.param(lambda: wrapped(False), id="FSDP1"),
        pytest.param(lambda: wrapped(True), id="FSDP1-original"),
        pytest.param(lambda: wrapped(True, True), id="FSDP1-inner"),
    ],
)
def test_sharded_parameters_are_refused(build: Callable[[], nn.Module]) -> None:
    model, loss_function = build(), packprop.extend(nn.CrossEntropyLoss())
    loss = loss_function(model(torch.randn(6, 4)), torch.randint(0, 3, (6,)))
    named = r"FSDP2[\s\S]*DistributedDataParallel"
    with pytest.raises(packprop.PackpropError, match=named), packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    loss.backward()  # the refused pass has changed nothing
    assert all(parameter.grad is not None for parameter in packprop.restore(model).parameters())


def test_other_models_are_not() -> None:
    sharded([], True)
    model, loss_function = packprop.extend(network()), packprop.extend(nn.CrossEntropyLoss())
    loss = loss_function(model(torch.randn(6, 4)), torch.randint(0, 3, (6,)))
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    assert model[0].weight.grad_batch.shape == (6, 5, 4)
