"""Values of all ranks in a monitored step are those of one process that has all samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from packprop.engine.distributed import AllRanks
from packprop.errors import PackpropError
from packprop.monitor import Monitor
from tests.distributed.processes import in_processes, needs_groups
from tests.selection import thorough

pytestmark = needs_groups

QUANTITIES = ["gradient_norm", "noise_scale", "sample_norms", "outliers", "update_ratio"]


def built() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3)).double()


def check(rank: int) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(16, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (16,), generator=generator)
    x[9] *= 200  # in the first pass, of the second rank
    logged = []
    model = built()
    parallel = DistributedDataParallel(model)
    monitor = Monitor(
        model,
        quantities=QUANTITIES,
        ranks=AllRanks(share="equal"),
        log=lambda values, step: logged.append(values),
    )
    own = torch.arange(8) + 8 * rank
    with monitor.step() as step:
        for part in own.split(4):
            step.identify(part)
            (F.cross_entropy(parallel(x[part]), y[part]) / 2).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    alone = built()
    expected = Monitor(alone, quantities=QUANTITIES, log=None)
    with expected.step(range(16)):
        F.cross_entropy(alone(x), y).backward()
        torch.optim.SGD(alone.parameters(), lr=0.1).step()
    assert len(logged) == (rank == 0)
    assert monitor.last is not None
    assert expected.last is not None
    (one,), (other,) = monitor.last["outliers"], expected.last["outliers"]
    assert one["sample"] == other["sample"] == 9
    for name, value in monitor.last.items():
        if name != "outliers" and "_low" not in name and "_high" not in name:
            assert value == pytest.approx(expected.last[name]), name


class Shifted(nn.Module):
    """A layer behind a buffer, which the first rank sends to the others before each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.shift)  # type: ignore[no-any-return]  # a module's call is Any


def train(
    rank: int, told: bool, restarted: bool = False, before: Callable[[], None] = lambda: None, **options: Any
) -> None:
    """Train on two ranks; in two of 16 steps the first one has a bad batch, and runs it again alone."""
    torch.manual_seed(3)
    model, alone = Shifted().double(), Shifted().double()
    alone.load_state_dict(model.state_dict())
    parallel = DistributedDataParallel(model, **options)
    monitor = Monitor(parallel if told else model, log=None)
    if restarted:  # with a range: the first step may be out of it
        monitor.load_state_dict({"next": 0, "window": {}, "ranges": {"loss": [0.5, 2.0] * 10}})
    bad = {0, 14} if restarted else {12, 14}
    for step in range(16):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2, 8, 4, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (2, 8), generator=generator)
        if step in bad:
            x[0] *= 500

        def run(x: Tensor = x[rank], y: Tensor = y[rank]) -> Tensor:
            before()
            return F.cross_entropy(parallel(x), y)

        parallel.zero_grad()
        loss = run()
        loss.backward()
        flag, buffers_first = parallel.require_backward_grad_sync, parallel.require_forward_param_sync
        if rank == 0 and step in bad and before is exchange:
            with pytest.raises(PackpropError, match="all ranks exchange values"):
                monitor.check(loss, run)
        else:
            assert (monitor.check(loss, run) is not None) == (rank == 0 and step in bad)
        assert parallel.require_backward_grad_sync is flag
        assert parallel.require_forward_param_sync is buffers_first
        alone.zero_grad()
        sum(F.cross_entropy(alone(x[r]), y[r]) / 2 for r in range(2)).backward()  # type: ignore[union-attr]  # no int
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            torch.testing.assert_close(one.grad, other.grad)


def exchange() -> None:
    counted = torch.ones(())
    torch.distributed.all_reduce(counted)
    assert counted == 2


def spikes_of_one_rank(rank: int) -> None:
    train(rank, told=True)
    train(rank, told=False, restarted=True)
    train(rank, told=False, find_unused_parameters=True)
    train(rank, told=True, static_graph=True, gradient_as_bucket_view=True)
    train(rank, told=True, before=exchange)


def sharded(rank: int) -> None:
    """Every rank is refused at once, whether it has a spike or not."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(4, 3), mesh=init_device_mesh("cpu", (2,)))
    monitor = Monitor(model, log=None)
    x = torch.randn(8, 4)
    loss = model(x).square().mean()  # the whole parameters stay until the backward pass
    for number in (1.0, float("nan")):
        with pytest.raises(PackpropError, match="sharded over processes"):
            monitor.check(number, lambda: model(x).square().mean())
    loss.backward()
    with pytest.raises(PackpropError, match="sharded over processes"), monitor.step():
        pass


@thorough
def test_two_ranks() -> None:
    in_processes(check, 2)


@thorough
def test_a_rank_runs_its_spikes_alone() -> None:
    in_processes(spikes_of_one_rank, 2)


@thorough
@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="cannot shard on the CPU")
def test_sharded_models_are_refused_on_every_rank() -> None:
    in_processes(sharded, 2)
