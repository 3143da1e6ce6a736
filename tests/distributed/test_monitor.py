"""Values of all ranks in a monitored step are those of one process that has all samples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from packprop.engine.distributed import AllRanks
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


@thorough
def test_two_ranks() -> None:
    in_processes(check, 2)
