"""Sums over a data set are kept as shards, and handed over as `DTensor`s placed like the parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import BadInput, Result, extensions
from packprop.applications.dataset.shards import ShardedResults
from tests.dataset.on_ranks import SIZE, asked, network, samples
from tests.dataset.test_sharded import pytestmark as needs_sharding
from tests.dataset.test_sharded import sharded
from tests.distributed.processes import in_processes, run_each
from tests.selection import thorough

pytestmark = needs_sharding

OF_PARAMETERS = ("sum_grad_squared", "variance", "diag_ggn_exact", "diag_h")


def compute(model: nn.Module, data: Any, given: list[Any], loss: Any = None, **options: Any) -> Result:
    loss = loss or nn.CrossEntropyLoss()
    return packprop.compute(model, loss, data, given, batch_size=SIZE, progress=False, **options)


def assert_same(found: Result, expected: Result) -> None:
    assert found.samples == expected.samples
    for savefield, values in expected.items():
        for name, value in values.items():
            torch.testing.assert_close(found[savefield][name], value, rtol=1e-9, atol=1e-13)


def placed_like_parameters(rank: int) -> None:
    """Also on a mesh of replicas; what is of another shape is whole."""
    from torch.distributed.device_mesh import init_device_mesh

    expected = compute(network(), samples(), asked(), ranks="own")
    del expected.tables["ekfac"]  # eigenvectors have any sign
    for shape in (None, (1, 2), (2, 1)):
        names = ("replicas", "shards")
        mesh = {} if shape is None else {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}
        model = sharded(**mesh)
        result = compute(model, samples(), asked())
        for savefield, values in result.items():
            for name, value in values.items():
                parameter = model.get_parameter(name)
                if savefield in OF_PARAMETERS:
                    assert value.placements == parameter.placements  # type: ignore[union-attr]  # DTensors
                    assert value.shape == parameter.shape  # type: ignore[union-attr]  # a DTensor
                    assert value.to_local().shape == parameter.to_local().shape  # type: ignore[union-attr,operator]  # DTensors
                elif isinstance(value, Tensor):
                    assert type(value) is Tensor
        assert_same(result.whole(), expected)


def kept_as_shards(rank: int) -> None:
    """Between batches no rank has more than its shards of sums; nothing waits."""
    sizes = []
    end_pass = ShardedResults.end_pass

    def watched(self: ShardedResults, ranks: Any) -> None:
        end_pass(self, ranks)
        assert not self.partial
        assert not self.arrived
        tensors = [t for value in self.kept.values() for t in (value if isinstance(value, tuple) else [value])]
        sizes.append(sum(t.untyped_storage().nbytes() // 8 for t in tensors if isinstance(t, Tensor)))

    model = sharded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedResults, "end_pass", watched)
        compute(model, samples(), [extensions.Variance(), extensions.DiagGGNExact()])
    own = sum(parameter.to_local().numel() for parameter in model.parameters())  # type: ignore[attr-defined]  # DTensors
    assert own < sum(parameter.numel() for parameter in model.parameters())
    assert sizes == [3 * own] * 3  # mean, deviation, diagonal


class Tied(nn.Module):
    """One weight for two layers, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.second.weight = self.first.weight
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.last(hidden)  # type: ignore[no-any-return]  # a module's call is Any


def tied_and_frozen(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    def made() -> nn.Module:
        torch.manual_seed(4)
        return Tied().double()

    given = [extensions.Variance(), extensions.DiagGGNExact(), extensions.KFLR()]
    expected = compute(made(), samples(), given, ranks="own")
    assert_same(compute(fully_shard(made()), samples(), given).whole(), expected)


def counted_by_data(rank: int) -> None:
    """Moments of tokens, of which the targets say how many count; on one rank none does in its last batch."""
    source = torch.Generator().manual_seed(7)
    x = torch.randn(23, 4, 3, generator=source).double()
    y = torch.randint(2, (23, 4), generator=source)
    y[torch.rand(23, 4, generator=source) < 0.3] = -100
    y[20:] = -100

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    given = [extensions.Variance(per="token"), extensions.SumGradSquared(per="token")]
    expected = compute(network(), (x, y), given, loss, ranks="own")
    assert_same(compute(sharded(), (x, y), given, loss).whole(), expected)


def told_and_saved(rank: int, folder: Path) -> None:
    """One rank alone may print a result; it is saved as whole tensors, or each rank's part by PyTorch."""
    import torch.distributed.checkpoint as dcp

    result = compute(sharded(), samples(), [extensions.Variance(), extensions.KFLR()])
    if rank == 0:
        assert "sharded values: this rank's part" in str(result)
        with pytest.raises(BadInput, match=r"call result.whole\(\) on all ranks"):
            result.save(folder / "parts.safetensors")
    whole = result.whole()
    assert whole.whole() is whole
    assert "part" not in whole.summary().rpartition("\n")[2]
    if rank == 0:
        whole.save(folder / "whole.safetensors")
        assert_same(Result.load(folder / "whole.safetensors"), whole)
    dcp.save({"variance": result["variance"]}, checkpoint_id=folder / "parts")
    into = {"variance": {name: torch.zeros_like(v) for name, v in result["variance"].items()}}  # type: ignore[arg-type]  # DTensors
    dcp.load(into, checkpoint_id=folder / "parts")
    for name, value in into["variance"].items():
        assert torch.equal(value.full_tensor(), whole["variance"][name])  # type: ignore[attr-defined,arg-type]  # a DTensor


def every_check(rank: int, folder: Path) -> None:
    checks = [placed_like_parameters, kept_as_shards, tied_and_frozen, counted_by_data]
    run_each(rank, [*checks, lambda rank: told_and_saved(rank, folder)])


@thorough
def test_results_are_shards(tmp_path: Path) -> None:
    in_processes(every_check, 2, tmp_path)
