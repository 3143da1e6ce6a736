"""Plans for models that are sharded over devices, none of which is there, beside two processes that are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import packprop
from packprop import extensions
from packprop.engine.tensors.nesting import tensors_in
from packprop.errors import BadInput
from tests.distributed.processes import in_processes, needs_groups
from tests.memory.allocated import most_allocated
from tests.selection import thorough

WIDTH, WORDS, LENGTH, DEPTH = 128, 1000, 48, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(outputs: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), words.flatten())


def batch() -> tuple[Tensor, Tensor]:
    words = torch.randint(WORDS, (4, LENGTH))
    return words, words


def peak_of_a_step(rank: int, name: str) -> int:
    """The most bytes that a rank holds in a step of a training loop, under ``fully_shard``."""
    model, asked = Words(), getattr(extensions, name)()
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    packprop.extend(fully_shard(model, mesh=mesh))
    words, targets = batch()

    def step() -> None:
        with packprop.record():
            value = loss(model(words), targets)
        with packprop.backpack(asked, ranks="all"):
            value.backward()

    step()
    model.zero_grad()

    def held(value: Any) -> int:
        return sum(getattr(each, "_local_tensor", each).nbytes for each in tensors_in(value))

    before = held([*model.parameters()]) + held([getattr(p, asked.savefield) for p in model.parameters()])
    return before + most_allocated(step)


@thorough
@needs_groups
@pytest.mark.parametrize("name", ["SumGradSquared", "BatchL2Grad", "DiagGGNMC"])
def test_a_plan_beside_two_processes(name: str) -> None:
    """The kernels' own memory is not seen, nor what gloo takes for itself."""
    planned = packprop.plan(Words(), loss, batch(), [getattr(extensions, name)()], mesh_shape=2)
    (first, second) = in_processes(peak_of_a_step, 2, name)
    assert first == pytest.approx(planned.peak, rel=0.15)
    assert second == pytest.approx(planned.peak, rel=0.15)
    alone = packprop.plan(Words(), loss, batch(), [getattr(extensions, name)()])
    assert planned.parts["parameters"] == pytest.approx(alone.parts["parameters"] / 2, rel=0.01)


@thorough
def test_a_model_that_fits_nowhere() -> None:
    """Parameters fall to their share; what is left are activations and the units that compute."""
    with torch.device("meta"):
        model, words = Words(), torch.zeros(4, LENGTH, dtype=torch.long)
    asked = [extensions.SumGradSquared()]
    found = [packprop.plan(model, loss, (words, words), asked, mesh_shape=(2, count)) for count in (1, 4, 16)]
    shards = [each.parts["parameters"] for each in found]
    assert shards[0] == pytest.approx(4 * shards[1], rel=0.01)
    assert shards[0] == pytest.approx(16 * shards[2], rel=0.01)
    assert [each.mesh is not None and each.mesh.shards for each in found] == [1, 4, 16]
    assert "on each of 2 x 16 meta devices" in str(found[2])


@thorough
def test_units_by_class() -> None:
    asked = [extensions.BatchL2Grad()]
    whole = packprop.plan(Words(), loss, batch(), asked, mesh_shape=4, units=())
    blocks = packprop.plan(Words(), loss, batch(), asked, mesh_shape=4, units=[Block])
    assert blocks.parts == packprop.plan(Words(), loss, batch(), asked, mesh_shape=4).parts
    assert whole.parts["unsharded parameters"] > blocks.parts["unsharded parameters"]
    total = sum(parameter.nbytes for parameter in Words().parameters())
    assert whole.parts["unsharded parameters"] == total


@pytest.mark.parametrize("shape", [0, (), (4, -1), (2.0,), True])
def test_shapes_that_are_none(shape: Any) -> None:
    with pytest.raises(BadInput, match="these are no numbers of devices"):
        packprop.plan(Words(), loss, batch(), [extensions.BatchL2Grad()], mesh_shape=shape)


def test_units_of_no_mesh() -> None:
    with pytest.raises(BadInput, match="there is no mesh"):
        packprop.plan(Words(), loss, batch(), [extensions.BatchL2Grad()], units=[Block])
