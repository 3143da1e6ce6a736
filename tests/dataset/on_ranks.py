"""What ranks do in the tests of data sets on several ranks; each function runs in one of several processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import packprop
from packprop import PackpropError, StoreWriter, extensions
from packprop.applications.dataset.run import Run
from packprop.engine.distributed import AllRanks
from packprop.engine.tensors.nesting import map_tensors
from tests.dataset.test_forms import Pairs

SIZE = 5


def samples(count: int = 23) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 3, generator=source).double()
    return inputs, torch.randint(2, (count,), generator=source)


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def asked() -> list[Any]:
    """Values that draw nothing: the same on any number of ranks."""
    return [
        extensions.BatchGrad(),
        extensions.BatchL2Grad(),
        extensions.SumGradSquared(),
        extensions.Variance(),
        extensions.DiagGGNExact(),
        extensions.DiagHessian(),
        extensions.KFLR(),
        extensions.KFAC(fisher="empirical"),
        extensions.EKFAC(fisher="exact"),
        extensions.BatchDiagGGNExact(),
    ]


def computed(data: Any, reduction: str = "mean", given: list[Any] | None = None, **options: Any) -> Any:
    """The values, number of samples and loss, in a form that can be sent."""
    model, loss = options.pop("model", None) or network(), nn.CrossEntropyLoss(reduction=reduction)
    loss = options.pop("loss", loss)
    found = packprop.compute(model, loss, data, asked() if given is None else given, progress=False, **options)
    found = found.whole()
    plain = {name: dict(values) for name, values in found.items()}
    return map_tensors(Tensor.numpy, (plain, found.samples, found.loss, found.reduction))


def states_after(rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Random states before and after values that draw nothing, or something, or fail."""
    x, y = samples()
    found = {}

    def failing(outputs: Tensor, targets: Tensor) -> Tensor:
        torch.rand(1)
        raise ValueError("no room")

    for name, seed, given, loss in (
        ("own, drawn", rank, extensions.DiagGGNMC(), nn.CrossEntropyLoss()),
        ("own, not drawn", rank, extensions.Variance(), nn.CrossEntropyLoss()),
        ("own, failed", rank, extensions.Variance(), failing),
        ("same, drawn", 0, extensions.DiagGGNMC(), nn.CrossEntropyLoss()),
        ("same, not drawn", 0, extensions.Variance(), nn.CrossEntropyLoss()),
    ):
        model = network()
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        with contextlib.suppress(PackpropError):
            packprop.compute(model, loss, (x, y), [given], batch_size=SIZE, progress=False)
        found[name] = before, torch.get_rng_state()
    return found


def batches_of(rank: int, world: int, unequal: bool) -> list[Any]:
    """This rank's batches, of several sizes; the last rank has the fewest, or none."""
    x, y = samples()
    cuts = [0, 4, 5, 5, 11, 12, 17, 20, 23]
    pieces = [(x[start:stop], y[start:stop]) for start, stop in itertools.pairwise(cuts)]
    if not unequal:
        return pieces[rank::world]
    with_any = world - 1
    return pieces[rank::with_any] if rank < with_any else []


def every_form(rank: int, world: int) -> dict[str, Any]:
    """Values of the same samples in all the ways in which they may be spread over ranks."""
    x, y = samples()
    shard = DistributedSampler(range(22), world, rank, shuffle=False) if world == 2 else None  # type: ignore[arg-type,var-annotated]  # a range is a data set
    found = {
        "tensors": computed((x, y), batch_size=SIZE),
        "sum": computed((x, y), "sum", batch_size=SIZE),
        "data set": computed(Pairs(x, y), batch_size=SIZE),
        "one batch": computed((x, y), batch_size=100),
        "batches": computed(batches_of(rank, world, unequal=False)),
        "unequal batches": computed(batches_of(rank, world, unequal=True)),
        "own": computed((x, y), batch_size=SIZE, ranks="own"),
        "some ranks": computed((x, y), batch_size=SIZE, ranks=AllRanks(timeout=30)),
    }
    if shard is not None:
        found["sampler"] = computed(DataLoader(TensorDataset(x[:22], y[:22]), SIZE, sampler=shard))
    return found


def by_size(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum") / len(targets)


def refusals(rank: int, world: int) -> dict[str, str]:
    """What is said, on this rank, of what does not go together."""
    x, y = samples()
    first = rank == 0
    padded = DataLoader(TensorDataset(x, y), SIZE, sampler=DistributedSampler(range(23), world, rank))  # type: ignore[arg-type]  # a range is a data set
    inside = DataLoader(padded.dataset, batch_sampler=BatchSampler(padded.sampler, SIZE, False))
    wide = nn.Linear(3, 2).double() if first else network()

    def broken() -> Iterator[Any]:
        yield x[:3], y[:3]
        if rank == 1:
            raise OSError("the disk is gone")
        yield x[3:], y[3:]

    mean = extensions.Variance()
    tries: dict[str, Any] = {
        "other model": lambda: computed((x, y), model=wide),
        "other values": lambda: computed((x, y), given=[mean if first else extensions.KFLR()]),
        "other data": lambda: computed((x, y) if first else (x + 1, y)),
        "bad data on one": lambda: computed((x, y) if first else 3),
        "read once": lambda: computed(iter([(x, y)])),
        "fails on one": lambda: computed(broken(), given=[mean]),
        "other reductions": lambda: computed([(x, y)], "mean" if first else "sum", given=[mean]),
        "other factors": lambda: computed(
            [(x[:9], y[:9]) if first else (x[9:], y[9:])], loss=by_size, given=[mean]
        ),
        "sampler that pads": lambda: computed(padded),
        "sampler that pads inside": lambda: computed(inside),
        "unknown ranks": lambda: computed((x, y), ranks="some"),
        "nothing": lambda: computed([]),
    }
    said = {}
    for name, call in tries.items():
        try:
            call()
            said[name] = "nothing"
        except PackpropError as error:
            said[name] = str(error)
    said["and goes on"] = str(computed((x, y), batch_size=SIZE)[1])
    return said


def interrupted(rank: int, folder: Path, steps: int, world: int, form: str, **options: Any) -> str:
    """A run that fails on the last rank, after some steps; a checkpoint is written after each."""
    x, y = samples()
    if rank == world - 1:
        os.environ["FAILS_AT"] = "16" if world == 2 else "12"  # of batch 4, or of batch 3 again
    data: Any = Failing(x, y) if form == "samples" else batches_of(rank, world, False)
    if form == "batches" and rank == world - 1:
        data = failing(data, steps)
    size = {"batch_size": SIZE} if form == "samples" else {}
    try:
        computed(data, checkpoint=folder, every=1, **size, **options)
    except PackpropError as error:
        return str(error)
    return "it came to its end"


def failing(batches: list[Any], steps: int) -> Any:
    class Data:
        def __iter__(self) -> Iterator[Any]:
            yield from batches[:steps]
            raise OSError("the disk is gone")

    return Data()


class Failing(Pairs):
    """A data set of which the environment says which sample cannot be read."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == int(os.environ.get("FAILS_AT", "-1")):
            raise OSError("the disk is gone")
        return super().__getitem__(index)


def continued(rank: int, folder: Path, world: int, form: str, **options: Any) -> Any:
    """The rest of such a run."""
    x, y = samples()
    if form == "samples":
        return computed(Failing(x, y), checkpoint=folder, every=1, batch_size=SIZE, **options)
    try:
        return computed(batches_of(rank, world, False), checkpoint=folder, every=1, **options)
    except PackpropError as error:
        return str(error)


def left_alone(rank: int, world: int) -> tuple[str, float]:
    """What the others see, and when, if the last rank is killed after three batches."""
    x, y = samples()

    def batches() -> Iterator[Any]:
        for number in range(100):
            if rank == world - 1 and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield x, y

    start = time.monotonic()
    try:
        computed(batches(), given=[extensions.Variance()])
    except PackpropError as error:
        return str(error), time.monotonic() - start
    return "nothing", 0.0


def drawn(rank: int, world: int, folder: Path) -> Any:
    """Draws of ranks that all begin with one seed, and the same again from a checkpoint."""
    x, _ = samples()
    same = x[:1].expand(8, 3), torch.zeros(8, dtype=torch.long)

    def run(data: Any, **options: Any) -> Any:
        torch.manual_seed(0)
        source = torch.Generator().manual_seed(5)
        given = [extensions.BatchDiagGGNMC(generator=source), extensions.EKFAC(mc_samples=2), extensions.KFAC()]
        return computed(data, given=given, batch_size=2, **options)

    alone = run(Failing(*same))
    os.environ["FAILS_AT"] = "6"
    try:
        run(Failing(*same), checkpoint=folder, every=1)
    except PackpropError:
        del os.environ["FAILS_AT"]
        return alone, run(Failing(*same), checkpoint=folder)
    raise AssertionError("it did not fail")


WHERE = {
    "step": (Run, "_take"),
    "interrupt": (Run, "_take"),
    "end of a reading": (Run, "_take"),
    "commit": (StoreWriter, "commit"),
    "own state": (Run, "_own_state"),
    "state": (Run, "_own_state"),
}
"""Methods in whose second call a rank fails, where a checkpoint is due; or in the call after its last batch."""


class Loader:
    """Keeps its position, which on one rank no file can hold, after some batches."""

    def __init__(self, batches: list[Any], breaks: bool) -> None:
        self.batches, self.told, self.breaks = batches, 0, breaks

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def state_dict(self) -> dict[str, Any]:
        self.told += 1
        return {"position": object() if self.breaks and self.told > 1 else self.told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def breaking(really: Any, where: str) -> Any:
    """The method, which fails where a rank shall fail."""
    calls = itertools.count(1)

    def method(self: Any, *arguments: Any) -> Any:
        value, call = really(self, *arguments), next(calls)
        if arguments[:1] == (None,) if where == "end of a reading" else call == 2:
            raise (KeyboardInterrupt if where == "interrupt" else OSError)("the disk is gone")
        return value

    return method


def fails_when_due(rank: int, world: int, folder: Path) -> dict[str, tuple[str, Any]]:
    """What each rank says if the last one fails where a checkpoint is due, and what comes afterwards."""
    found = {}
    for where, (owner, name) in WHERE.items():
        fails, really = rank == world - 1, getattr(owner, name)
        x, y = samples()
        options: dict[str, Any] = {"checkpoint": folder / where, "given": [extensions.BatchL2Grad()]}
        options |= {"store": folder / "store"} if where == "commit" else {}
        given: Any = Loader(batches_of(rank, world, False), fails) if where == "state" else (x, y)
        given = batches_of(rank, world, True) if where == "end of a reading" else given
        options |= {"batch_size": SIZE} if isinstance(given, tuple) else {}
        if fails and where != "state":
            setattr(owner, name, breaking(really, where))
        try:
            computed(given, every="1h" if where == "end of a reading" else 1, **options)
            said = "nothing"
        except (PackpropError, OSError, KeyboardInterrupt) as error:
            said = str(error)
        setattr(owner, name, really)
        found[where] = said, computed((x, y), given=[extensions.Variance()])[1]
    return found


def stores(rank: int, world: int, folder: Path) -> None:
    for size in (2, 100):
        options: dict[str, Any] = {"batch_size": size, "store": folder / str(size)}
        computed(samples(), given=[extensions.BatchGrad()], **options)
