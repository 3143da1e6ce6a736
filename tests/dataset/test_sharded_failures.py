"""What fails on one rank of a sharded model is told to all before they wait for it, and all can go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import PackpropError, extensions
from tests.dataset.on_ranks import network, samples
from tests.dataset.test_ranks import assert_near
from tests.dataset.test_sharded import pytestmark as needs_sharding
from tests.dataset.test_sharded import sharded
from tests.distributed.processes import in_processes
from tests.selection import thorough

pytestmark = needs_sharding


def compute(model: nn.Module, data: Any, loss: Any = None, given: Any = None) -> packprop.Result:
    given = given or [extensions.Variance()]
    return packprop.compute(model, loss or nn.CrossEntropyLoss(), data, given, progress=False)


def told(call: Any) -> str:
    try:
        call()
    except PackpropError as error:
        return str(error)
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    return "nothing"


class OtherWays(nn.Module):
    """Each rank calls the units in an order of its own, or leaves one out."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        from torch.distributed.fsdp import fully_shard

        self.skips = skips
        self.first, self.second = fully_shard(nn.Linear(3, 3)), fully_shard(nn.Linear(3, 3))
        self.double()
        fully_shard(self)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.distributed.get_rank():
            return self.second(self.first(x))  # type: ignore[no-any-return]  # a module's call is Any
        return self.first(x if self.skips else self.second(x))  # type: ignore[no-any-return]  # a module's call is Any


class NotOnTheSecond(nn.Module):
    """Does nothing, and on the second rank raises as long as it is told to."""

    raises = True

    def forward(self, x: Tensor) -> Tensor:
        if self.raises and torch.distributed.get_rank() == 1:
            raise ValueError("no room")
        return x


def fails_and_goes_on(rank: int, place: int) -> str:
    """The forward pass fails before, between or in units; then shards are there, values and gradients right."""
    from torch.distributed.fsdp import fully_shard

    x, y = samples()
    model = network()
    model.insert(place, failing := NotOnTheSecond())  # type: ignore[operator]  # a Sequential
    first, between, last = (module for module in model if module is not failing)  # type: ignore[union-attr]  # a Sequential
    fully_shard(first)
    fully_shard([between, last])
    fully_shard(model)
    said = told(lambda: compute(model, (x, y)))
    shards = [*model.parameters()]
    assert all(hasattr(shard, "full_tensor") for shard in shards)
    failing.raises = False
    variances = compute(model, (x, y)).whole()["variance"]
    plain = network()
    for mine, value in zip(variances.values(), compute_alone(plain, (x, y)).values(), strict=True):
        assert_near(mine, value)  # type: ignore[arg-type]  # tensors
    for each in (model, plain):
        nn.CrossEntropyLoss()(each(x), y).backward()
    for shard, parameter in zip(shards, plain.parameters(), strict=True):
        assert_near(shard.grad.full_tensor(), parameter.grad)  # type: ignore[union-attr]  # a DTensor
    return said


def compute_alone(model: nn.Module, data: Any) -> Any:
    given = [extensions.Variance()]
    return packprop.compute(model, nn.CrossEntropyLoss(), data, given, progress=False, ranks="own")["variance"]


def failures(rank: int) -> dict[str, str]:
    x, y = samples()
    cross_entropy = nn.functional.cross_entropy

    def raising(outputs: Tensor, targets: Tensor) -> Tensor:
        if rank == 1:
            raise ValueError("no room")
        return cross_entropy(outputs, targets)

    def interrupted(outputs: Tensor, targets: Tensor) -> Tensor:
        if rank == 1:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.kill(os.getpid(), signal.SIGINT)
        return cross_entropy(outputs, targets)

    def not_a_mean(outputs: Tensor, targets: Tensor) -> Tensor:
        small = rank == 1 and len(outputs) == 2
        return cross_entropy(outputs, targets, reduction="sum" if small else "mean")

    class ReadOnce:
        """Batches that come once on the second rank."""

        begun = 0

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            self.begun += 1
            if rank == 1 and self.begun > 1:
                raise OSError("the disk is gone")
            yield x, y

    def print_nothing() -> None:
        pass

    def first_target(outputs: Tensor, targets: Any) -> Tensor:
        return cross_entropy(outputs, targets[0])

    broken = [(x, y) if rank == 0 else "no batch", (x, y)]
    two = [(x[:4], y[:4]), (x[:2], y[:2])]
    tries: dict[str, Any] = {
        "before all units": lambda: fails_and_goes_on(rank, 0),
        "between units": lambda: fails_and_goes_on(rank, 1),
        "in a unit of two": lambda: fails_and_goes_on(rank, 2),
        "loss": lambda: told(lambda: compute(sharded(), (x, y), raising)),
        "interrupt": lambda: told(lambda: compute(sharded(), (x, y), interrupted)),
        "reduction": lambda: told(lambda: compute(sharded(), two, not_a_mean)),
        "first batch": lambda: told(lambda: compute(sharded(), broken)),
        "first batch, not sharded": lambda: told(lambda: compute(network(), broken)),
        "second reading": lambda: told(
            lambda: compute(network(), ReadOnce(), given=[extensions.EKFAC(fisher="exact")])
        ),
        "batch that cannot be sent": lambda: told(
            lambda: compute(sharded(), [] if rank else [(x, (y, print_nothing))], first_target)
        ),
        "other order": lambda: told(lambda: compute(OtherWays(skips=False), (x, y))),
        "left out": lambda: told(lambda: compute(OtherWays(skips=True), (x, y))),
        "sharded on one": lambda: told(lambda: compute(network() if rank else sharded(), (x, y))),
    }
    said = {name: call() for name, call in tries.items()}
    said["and goes on"] = str(compute(sharded(), (x, y)).samples)
    return said


@thorough
@pytest.mark.filterwarnings("ignore")
def test_all_ranks_are_told() -> None:
    first, second = in_processes(failures, 2, seconds=60)
    elsewhere = "rank 1\n  why:     it has failed"
    expected = {
        "before all units": (elsewhere, "no room"),
        "between units": (elsewhere, "no room"),
        "in a unit of two": (elsewhere, "no room"),
        "loss": (elsewhere, "no room"),
        "interrupt": ("KeyboardInterrupt", "KeyboardInterrupt"),
        "reduction": ("it has refused its part of the pass", "reduces by mean, then by sum"),
        "first batch": (elsewhere, "it is not a pair"),
        "first batch, not sharded": (elsewhere, "it is not a pair"),
        "second reading": (elsewhere, "the disk is gone"),
        "batch that cannot be sent": ("it cannot be sent there", "rank 0\n  why:     it has failed"),
        "other order": ("in the same order",) * 2,
        "left out": ("in the same order",) * 2,
        "sharded on one": ("it is not divided as on rank 0",) * 2,
        "and goes on": ("23",) * 2,
    }
    assert list(first) == list(expected)
    for name, (of_first, of_second) in expected.items():
        assert of_first in first[name], (name, first[name])
        assert of_second in second[name], (name, second[name])
