"""A data set through a model that ``fully_shard`` has sharded: the values are those of one process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import packprop
from packprop import PackpropError, extensions
from packprop.applications.reports.cli import main
from tests.dataset import on_ranks
from tests.dataset.on_ranks import SIZE, batches_of, computed, network, samples
from tests.dataset.test_ranks import assert_near, assert_same
from tests.distributed.processes import in_processes, needs_groups, outcomes_of
from tests.selection import thorough

pytestmark = [
    needs_groups,
    pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="cannot shard on the CPU"),
]


def sharded(model: nn.Module | None = None, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = network() if model is None else model
    fully_shard(model[0], **options)  # type: ignore[index]  # a Sequential
    return fully_shard(model, **options)


def every_form(rank: int, world: int, store: Path) -> dict[str, Any]:
    """Values of one model, pass after pass; then a step of training, as if nothing had been."""
    x, y = samples()
    model = sharded()
    before = [parameter.to_local().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]  # DTensors
    unequal = batches_of(rank, world, unequal=True)
    found = {
        "samples": computed((x, y), batch_size=SIZE, model=model),
        "one batch": computed((x, y), batch_size=100, model=model),
        "sum": computed((x, y), "sum", batch_size=SIZE, model=model),
        "unequal batches": computed(unequal, model=model),
        "an empty batch": computed([(x[:0], y[:0]), *unequal][rank % 2 :], model=model),
        "reshard_after_forward=False": computed(
            (x, y), batch_size=SIZE, model=sharded(reshard_after_forward=False)
        ),
    }
    given = [extensions.BatchL2Grad()]
    computed((x, y), given=given, batch_size=SIZE, model=model, store=store, losses=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    for parameter, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.to_local(), was)  # type: ignore[attr-defined]  # a DTensor
    nn.CrossEntropyLoss()(model(x), y).backward()
    found["gradient"] = [parameter.grad.full_tensor().numpy() for parameter in model.parameters()]  # type: ignore[union-attr]  # DTensors
    return found


@thorough
def test_values_are_those_of_one_process(tmp_path: Path) -> None:
    """First and second order, a second reading, unequal numbers of batches, ranks without any.

    On three ranks; on two below, from checkpoint to checkpoint.
    """
    world = 3
    x, y = samples()
    mean, total = computed((x, y), batch_size=SIZE), computed((x, y), "sum", batch_size=SIZE)
    plain = network()
    nn.CrossEntropyLoss()(plain(x), y).backward()
    for found in in_processes(every_form, world, world, tmp_path / "store"):
        assert_same(found["samples"], mean)
        assert_same(found["one batch"], mean)
        assert_same(found["sum"], total)
        assert_same(found["unequal batches"], mean, rows=False)
        assert_same(found["an empty batch"], mean, rows=False)
        assert_same(found["reshard_after_forward=False"], mean)
        for mine, parameter in zip(found["gradient"], plain.parameters(), strict=True):
            assert_near(mine, parameter.grad)
    given = [extensions.BatchL2Grad()]
    computed((x, y), given=given, batch_size=SIZE, store=tmp_path / "alone", losses=True)
    for key in (("batch_l2", "0.weight"), "loss"):
        of_ranks, alone = (packprop.Store(tmp_path / each)[key] for each in ("store", "alone"))
        assert_near(np.sort(of_ranks[:]), np.sort(alone[:]))


def in_other_ways(rank: int) -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    x, y = samples()
    given = [extensions.Variance(), extensions.DiagGGNExact()]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    rounded = computed((x.float(), y), given=given, model=sharded(network().float(), mp_policy=policy))
    offloaded = computed((x, y), given=given, model=sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)))
    return rounded, offloaded


@thorough
def test_mixed_precision_and_offloading() -> None:
    x, y = samples()
    given = [extensions.Variance(), extensions.DiagGGNExact()]
    expected = computed((x, y), given=given)
    for rounded, offloaded in in_processes(in_other_ways, 2):
        assert_same(offloaded, expected)
        for savefield, values in expected[0].items():
            for name, value in values.items():
                mine = rounded[0][savefield][name]
                assert mine.dtype == np.float32  # as the parameters that the model holds
                torch.testing.assert_close(mine, value.astype(np.float32), rtol=0.1, atol=0.01)


def interrupted(rank: int, *arguments: Any) -> Any:
    return on_ranks.interrupted(rank, *arguments, model=sharded())


def continued(rank: int, *arguments: Any) -> Any:
    return on_ranks.continued(rank, *arguments, model=sharded())


@thorough
def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    """From two to three, to one that has the model as a whole; and the end is there for two."""
    x, y = samples()
    expected = computed((x, y), batch_size=SIZE)
    said = in_processes(interrupted, 2, tmp_path, 1, 2, "samples")
    assert "the first 2 batches, 10 samples" in said[0]
    assert all("the disk is gone" in each for each in said)
    said = in_processes(interrupted, 3, tmp_path, 1, 3, "samples")
    assert "the first 5 batches, 23 samples" in said[0] or "second reading" in said[0]
    assert_same(on_ranks.continued(0, tmp_path, 1, "samples"), expected)
    for again in in_processes(continued, 2, tmp_path, 2, "samples"):
        assert_same(again, expected)


class Mixing(nn.Module):
    """Mixes samples on the second rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0) if torch.distributed.get_rank() else x


def refusals(rank: int) -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    x, y = samples()

    def broken() -> Iterator[Any]:
        yield x[:3], y[:3]
        if rank == 1:
            raise OSError("the disk is gone")
        yield x[3:], y[3:]

    mixing = network()
    mixing[1] = Mixing()  # type: ignore[index]  # a Sequential
    in_parts = parallelize_module(network(), init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    tries: dict[str, Any] = {
        "memory": lambda: computed((x, y), memory="1GiB", model=sharded()),
        "alone": lambda: computed((x, y), ranks="own", model=sharded()),
        "tensor parallel": lambda: computed((x, y), model=in_parts),
        "fails on one": lambda: computed(broken(), given=[extensions.Variance()], model=sharded()),
        "functions": lambda: computed((x, y), given=[extensions.HMP()], model=sharded()),
        "no loss of torch": lambda: packprop.compute(
            sharded(), lambda f, y: f.square().mean(), [(x, y)], [extensions.Variance()], progress=False
        ),
        "mixes on one": lambda: computed([(x, y)], given=[extensions.Variance()], model=sharded(mixing)),
        "no samples": lambda: computed([], model=sharded()),
        "plan": lambda: packprop.plan(sharded(), nn.CrossEntropyLoss(), (x, y), [extensions.Variance()]),
    }
    said = {}
    for name, call in tries.items():
        try:
            call()
            said[name] = "nothing"
        except PackpropError as error:
            said[name] = str(error)
    said["and goes on"] = str(computed((x, y), batch_size=SIZE, model=sharded())[1])
    return said


@thorough
def test_what_cannot_be_had_is_refused_on_all_ranks() -> None:
    first, second = in_processes(refusals, 2)
    expected = {
        "memory": ("does not count what is put together",) * 2,
        "alone": ("none can read data alone",) * 2,
        "tensor parallel": ("parallelize_module",) * 2,
        "fails on one": ("the disk is gone",) * 2,
        "functions": ("belongs to the graph of one backward pass",) * 2,
        "no loss of torch": ("write it with loss functions of torch",) * 2,
        "mixes on one": ("it has refused its part of the pass", "Quantities of single samples"),
        "no samples": ("the data hold no sample",) * 2,
        "plan": ("packprop.plan(..., mesh_shape=(2,), units=[Linear])",) * 2,
        "and goes on": ("23",) * 2,
    }
    assert list(first) == list(expected)
    for name, (of_first, of_second) in expected.items():
        assert of_first in first[name], (name, first[name])
        assert of_second in second[name], (name, second[name])


def of_shape_and_factors() -> list[Any]:
    return [extensions.Variance(), extensions.KFLR()]


def left_alone(rank: int, folder: Path, kills: bool) -> Any:
    """What a rank is told when the last one is killed; values if none is."""
    x, y = samples()

    def batches() -> Iterator[Any]:
        for number in range(5):
            if kills and rank == 1 and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield x[5 * number + rank :][: 3 + rank], y[5 * number + rank :][: 3 + rank]

    options: dict[str, Any] = {"checkpoint": folder, "every": 1, "model": sharded()}
    try:
        return computed(batches(), given=of_shape_and_factors(), **options)
    except Exception as error:
        return str(error)


@thorough
def test_a_rank_that_is_killed_ends_the_others_and_the_run_goes_on(tmp_path: Path) -> None:
    outcomes = outcomes_of(left_alone, 2, tmp_path / "run", True, patient=True, seconds=60)
    assert outcomes[1].error == "it died"
    assert outcomes[0].error is None, outcomes[0].error
    assert "one of them has ended" in outcomes[0].value
    assert len([*(tmp_path / "run").glob("checkpoint-*.json")]) == 2
    x, y = samples()
    parts = [slice(5 * number + rank, 5 * number + 3 + 2 * rank) for number in range(5) for rank in (0, 1)]
    whole = torch.cat([x[part] for part in parts]), torch.cat([y[part] for part in parts])
    expected = computed(whole, given=of_shape_and_factors())
    for found in in_processes(left_alone, 2, tmp_path / "run", False):
        assert_same(found, expected)


FACTORY = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

def factory():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    if torch.distributed.is_initialized():
        fully_shard(model[0])
        fully_shard(model)
    source = torch.Generator().manual_seed(1)
    x, y = torch.randn(50, 4, generator=source).double(), torch.randint(3, (50,), generator=source)
    return model, nn.CrossEntropyLoss(), torch.utils.data.TensorDataset(x, y)
"""


def profiled(rank: int, folder: Path, *options: str) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    assert main(["profile", "made:factory", "--batch-size", "8", "--no-page", *options]) == 0


@thorough
def test_a_profile_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under ``torchrun``: written once, kept in a checkpoint, and the same as that of one process."""
    (tmp_path / "made.py").write_text(FACTORY)
    in_processes(profiled, 2, tmp_path, "--output", "two", "--checkpoint", "kept", group=False)
    monkeypatch.syspath_prepend(tmp_path)
    options = ["profile", "made:factory", "--batch-size", "8", "--no-page"]
    assert main([*options, "--output", str(tmp_path / "one")]) == 0
    assert main([*options, "--output", str(tmp_path / "again"), "--resume", str(tmp_path / "kept")]) == 0
    one, two, again = (packprop.Profile.load(tmp_path / each) for each in ("one", "two", "again"))
    assert one.settings["model"] == two.settings["model"] == "Sequential"
    for mine, kept, other in zip(two.layers, again.layers, one.layers, strict=True):
        assert mine.gradient_norm == kept.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-12)
        assert mine.kind == kept.kind == other.kind  # the class that the layer had before it was sharded
        assert mine.ggn_trace_exact == pytest.approx(other.ggn_trace_exact, rel=1e-12)
    assert [each.place for each in two.outlying] == [each.place for each in one.outlying]
