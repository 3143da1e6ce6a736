"""Runs that end midway, and go on from their checkpoint: the result is that of a run that was left alone."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import packprop
from packprop import BadInput, PackpropWarning, Store, extensions
from packprop.applications.dataset import checkpoint
from packprop.applications.dataset.batches import Batches
from packprop.applications.dataset.checkpoint import Checkpoint
from packprop.applications.dataset.folder import Folder
from packprop.applications.dataset.result import Result
from packprop.applications.dataset.state import MergedResults
from tests.dataset.kills import same
from tests.dataset.small import compute, small
from tests.dataset.test_forms import Pairs
from tests.distributed.processes import needs_groups
from tests.selection import often, one_in, thorough

SAMPLES, SIZE = 23, 5


class Broken(Exception):
    """The process was to be ended here."""


class Breaking(nn.Module):
    """A model that fails in one of its calls."""

    def __init__(self, fails: int | None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Tanh(), nn.Linear(4, 2)).double()
        self.calls: list[int] = []
        self.left = fails  # which calls change: so it is no option of the model

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        self.left = None if self.left is None else self.left - 1
        if self.left == 0:
            raise KeyboardInterrupt
        out: Tensor = self.layers(x)
        return out


class Stateful:
    """A loader that shuffles, and keeps its own position; what it gave is not given again."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.begin, self.given = x, y, 0, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        begin, self.begin = self.begin, 0
        self.given = begin
        for start in range(begin * SIZE, len(self.x), SIZE):
            self.given += 1
            yield self.x[start : start + SIZE], self.y[start : start + SIZE]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "nested": (b"bytes", torch.ones(2), None)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["nested"][0] == b"bytes"
        self.begin = state["given"]


class Drawn(Pairs):
    """A data set that changes its samples by random numbers."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(3).double(), y


class DrawnElsewhere(Pairs):
    """A data set that changes its samples by numbers of Python and of numpy."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + 0.1 * random.gauss(0, 1) + 0.1 * np.random.standard_normal(), y  # noqa: NPY002  # as users do


def samples() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 3, generator=source).double()
    return inputs, torch.randint(2, (SAMPLES,), generator=source)


def split(x: Tensor, y: Tensor) -> list[Any]:
    return list(zip(x.split(SIZE), y.split(SIZE), strict=True))


def shuffled(x: Tensor, y: Tensor) -> Any:
    return DataLoader(Drawn(x, y), SIZE, shuffle=True, generator=torch.Generator().manual_seed(2))


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensors": lambda x, y: (x, y),
    "TensorDataset": TensorDataset,
    "samples that draw": Drawn,
    "samples that draw elsewhere": DrawnElsewhere,
    "list": split,
    "shuffled": lambda x, y: DataLoader(Drawn(x, y), SIZE, shuffle=True),
    "shuffled, drawn elsewhere": lambda x, y: DataLoader(DrawnElsewhere(x, y), SIZE, shuffle=True),
    "shuffled by a generator": shuffled,
    "with a state": Stateful,
}
BY_SAMPLE = ("tensors", "TensorDataset", "samples that draw", "samples that draw elsewhere")


def asked_of(source: torch.Generator | None) -> list[Any]:
    return [
        extensions.BatchGrad(),
        extensions.Variance(),
        extensions.DiagHessianMC(),
        extensions.KFAC(mc_samples=2),
        extensions.EKFAC(mc_samples=2, generator=source),
    ]


def run(
    form: str, fails: int | None = None, data: Any = None, **options: Any
) -> tuple[Result, Breaking, Tensor]:
    """The result, the model, and numbers that are drawn afterwards."""
    torch.manual_seed(4)
    random.seed(4)
    np.random.seed(4)  # noqa: NPY002  # what functions draw from
    model = Breaking(fails)
    asked = asked_of(torch.Generator().manual_seed(3))
    given = FORMS[form](*samples()) if data is None else data() if callable(data) else data
    size = {"batch_size": SIZE} if form in BY_SAMPLE else {}
    found = compute(model, nn.CrossEntropyLoss(), given, *asked, **size, **options)
    return found, model, torch.rand(2)


@often(lambda form, every: every == 2 and form == "shuffled")
@pytest.mark.parametrize("every", [1, 2, "1h"])
@pytest.mark.parametrize("form", FORMS)
def test_it_goes_on_from_where_it_was(form: str, every: Any, tmp_path: Path) -> None:
    """Interrupted in the middle of a batch, of either reading; the numbers that are drawn are the same, too."""
    alone, left_alone, numbers = run(form)
    calls = len(left_alone.calls)
    for number, fails in enumerate((4, 3)):  # in the first reading, then in the second one
        with pytest.raises(KeyboardInterrupt):
            run(form, fails if number == 0 else fails + 2, checkpoint=tmp_path, every=every)
    found, model, drawn = run(form, checkpoint=tmp_path, every=every)
    assert same(found, alone)
    assert torch.equal(drawn, numbers)
    keeps = form != "with a state" or every == 1  # such a loader is behind the batch that failed
    assert len(model.calls) == calls - 7 if keeps else len(model.calls) >= calls - 7


def test_a_run_that_has_ended_gives_its_result_at_once(tmp_path: Path) -> None:
    alone, _, numbers = run("list", checkpoint=tmp_path)
    found, model, drawn = run("list", checkpoint=tmp_path)
    assert same(found, alone)
    assert torch.equal(drawn, numbers)
    assert not model.calls


def test_a_data_set_is_not_read_again(tmp_path: Path) -> None:
    read: list[int] = []

    class Noting(Pairs):
        fails = False

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            read.append(index)
            if index == 12 and self.fails:
                self.fails = False
                raise OSError("the disk is gone")
            return super().__getitem__(index)

    model, (x, y) = small(SAMPLES)
    data = Noting(x, y)
    for fails in (True, False):
        read.clear()
        data.fails = fails
        with pytest.raises(BadInput) if fails else pytest.MonkeyPatch.context():
            compute(model, nn.CrossEntropyLoss(), data, extensions.Variance(), batch_size=SIZE,
                    checkpoint=tmp_path)  # fmt: skip
    assert read[-13:] == [*range(10, SAMPLES)]
    assert {*read[:-13]} <= {0, 7, 15, 22}  # these tell the data from others
    assert len(read[:-13]) <= 8


def breaking(batches: list[Any], after: int) -> Iterator[Any]:
    yield from batches[:after]
    raise OSError("the disk is gone")


def test_data_that_fail_midway(tmp_path: Path) -> None:
    """What was done is kept, and said; an iterator that is given anew goes on from there."""
    model, (x, y) = small(SAMPLES)
    asked, loss = [extensions.BatchGrad(), extensions.Variance()], nn.CrossEntropyLoss()
    with pytest.raises(BadInput, match="the disk is gone") as error:
        compute(model, loss, breaking(split(x, y), 3), *asked, checkpoint=tmp_path)
    assert "the first 3 batches, 15 samples" in error.value.instead
    assert str(tmp_path) in error.value.instead
    found = compute(model, loss, iter(split(x, y)), *asked, checkpoint=tmp_path)
    assert same(found, compute(model, loss, split(x, y), *asked))


def test_a_batch_that_fails(tmp_path: Path) -> None:
    """A batch of another structure: those before it are kept."""
    model, (x, y) = small(SAMPLES)
    asked, loss = [extensions.BatchGrad(), extensions.Variance()], nn.CrossEntropyLoss()
    batches = split(x, y)
    wrong = [*batches[:2], (batches[2][0][:, :2], batches[2][1]), *batches[3:]]
    with pytest.raises(BadInput, match="mat1") as error:
        compute(model, loss, wrong, *asked, checkpoint=tmp_path)
    assert "the first 2 batches, 10 samples" in error.value.instead
    found = compute(model, loss, batches, *asked, checkpoint=tmp_path)
    assert same(found, compute(model, loss, batches, *asked))


class Failing(Stateful):
    """A loader that fails, or is interrupted, while it makes a batch that it has counted."""

    def __init__(self, error: type[BaseException] | None, left: int) -> None:
        super().__init__(*samples())
        self.error, self.left = error, left

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in super().__iter__():
            self.left -= 1  # written by the code, as the error below: so neither is an option
            error, self.error = (self.error, None) if self.left == 0 else (None, self.error)
            if error is not None:
                raise error
            yield batch


@one_in(4)
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("batch", [4, 9])  # of the first reading, and of the second one
@pytest.mark.parametrize("every", [2, "1h"])
def test_a_loader_with_a_state_that_fails(
    every: Any, batch: int, error: type[BaseException], tmp_path: Path
) -> None:
    """It has counted the batch that it did not make, which must not be lost."""
    alone, _, _ = run("with a state", data=Failing(None, 0))
    with pytest.raises((BadInput, KeyboardInterrupt)):
        run("with a state", data=Failing(error, batch), checkpoint=tmp_path, every=every)
    found, _, _ = run("with a state", data=Failing(None, 0), checkpoint=tmp_path, every=every)
    assert found.samples == SAMPLES
    assert same(found, alone)


@pytest.mark.parametrize("change", ["order", "values", "fewer"])
def test_other_data_are_noticed(change: str, tmp_path: Path) -> None:
    model, (x, y) = small(SAMPLES)
    asked, loss = extensions.Variance(), nn.CrossEntropyLoss()
    with pytest.raises(BadInput, match="the disk is gone"):
        compute(model, loss, breaking(split(x, y), 3), asked, checkpoint=tmp_path)
    batches = split(x, y)
    if change == "order":
        batches[0], batches[1] = batches[1], batches[0]
    elif change == "values":
        batches[0][0][0, 0] += 1e-9
    else:
        del batches[2:]
    with pytest.raises(BadInput, match="3 batches had been read") as error:
        compute(model, loss, batches, asked, checkpoint=tmp_path)
    assert ("2 batches only" if change == "fewer" else "another order") in error.value.why


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@thorough
def test_a_stateful_data_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    for shuffle in (False, True):
        folder = tmp_path / str(shuffle)

        def loader(shuffle: bool = shuffle) -> Any:
            return stateful(Pairs(*samples()), SIZE, shuffle=shuffle)

        alone, _, _ = run("with a state", data=loader())
        for fails in (4, 4, 4):
            with pytest.raises(KeyboardInterrupt):
                run("with a state", fails, data=loader(), checkpoint=folder, every=1)
        found, _, _ = run("with a state", data=loader(), checkpoint=folder, every=1)
        assert same(found, alone)
        with monkeypatch.context() as patch:  # all batches of the first reading were given, and are kept
            patch.setattr(MergedResults, "end_first_reading", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run("with a state", data=loader(), checkpoint=folder / "end", every=1)
        found, model, _ = run("with a state", data=loader(), checkpoint=folder / "end", every=1)
        assert same(found, alone)
        assert len(model.calls) == 5


@thorough
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_groups)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork of a process with threads: torch's are idle
def test_killed_at_random_moments(ranks: int) -> None:
    """A few of the many that `python -m tests.dataset.kills` makes."""
    command = [sys.executable, "-m", "tests.dataset.kills", "--kills", "5", "--ranks", str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] >= 5
    assert (found["wrong"], found["could not go on"]) == (0, 0)


def test_every_is_a_time_or_a_number(tmp_path: Path) -> None:
    model, data = small()
    for every in ("30", "soon", 0, -1, 2.5, True, None):
        with pytest.raises(BadInput, match="neither a time nor a number"):
            compute(model, nn.CrossEntropyLoss(), data, extensions.Variance(), checkpoint=tmp_path, every=every)
    for good in ("0.5s", "5 min", "1h", 3):
        folder = tmp_path / str(good)
        compute(model, nn.CrossEntropyLoss(), data, extensions.Variance(), checkpoint=folder, every=good)


@thorough
def test_the_budget_chooses_the_same_chunks(tmp_path: Path) -> None:
    """Chunks decide how sums are rounded, and which batch came first decides chunks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 50), nn.Sigmoid(), nn.Linear(50, 4)).double()
    x, y = torch.randn(60, 6).double(), torch.randint(4, (60,))
    batches = list(zip(x.split([10, 30, 20]), y.split([10, 30, 20]), strict=True))
    asked, options = [extensions.SumGradSquared(), extensions.DiagGGNExact()], {"memory": "400KiB"}
    alone = compute(model, nn.CrossEntropyLoss(), batches, *asked, **options)
    for after in (1, 2):
        with pytest.raises(BadInput, match="the disk is gone"):
            compute(
                model, nn.CrossEntropyLoss(), breaking(batches, after), *asked, checkpoint=tmp_path, **options
            )
    found = compute(model, nn.CrossEntropyLoss(), batches, *asked, checkpoint=tmp_path, **options)
    assert same(found, alone)


@pytest.mark.parametrize("what", ["full", "truncated"])
def test_a_finished_result_is_returned_where_nothing_can_be_written(what: str, tmp_path: Path) -> None:
    """Whatever happens to the folder while the run goes on, it ends with its result."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    alone, _, _ = run("tensors")
    with pytest.raises(KeyboardInterrupt):
        run("tensors", 3, checkpoint=tmp_path, every=1)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("checkpoint-*.json")}
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000 if what == "full" else 100, hard))
        with pytest.warns(PackpropWarning, match="could not be written") as warned:
            found, _, _ = run("tensors", checkpoint=tmp_path, every=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "the first 2 batches, 10 samples" in str(warned[0].message)
    assert len([each for each in warned if "could not be written" in str(each.message)]) == 1  # once
    assert same(found, alone)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("checkpoint-*.json")} == before
    assert not list(tmp_path.glob("*.part"))
    found, model, _ = run("tensors", checkpoint=tmp_path)
    assert same(found, alone)
    assert len(model.calls) == 2 * 5 - 2


def test_a_store_goes_on_with_its_checkpoint(tmp_path: Path) -> None:
    """Rows that came after the checkpoint are cut off, and come again; a writer of one's own does the same."""
    (x, y), kept = samples(), tmp_path / "kept"

    def stored(fails: int | None, store: Any, **options: Any) -> Result:
        torch.manual_seed(4)
        asked = [extensions.BatchGrad(), extensions.Variance()]
        given = (x, y), asked[0], asked[1]
        return compute(Breaking(fails), nn.CrossEntropyLoss(), *given, batch_size=SIZE, store=store, **options)

    alone = stored(None, tmp_path / "alone")
    for fails in (4, 2):
        with pytest.raises(KeyboardInterrupt):
            stored(fails, tmp_path / "store", checkpoint=kept, every=2)
    found = stored(None, tmp_path / "store", checkpoint=kept, every=2)
    assert same(found, alone)
    expected, rows = Store(tmp_path / "alone"), Store(tmp_path / "store")
    assert (rows.samples, rows.terms, rows.finished) == (SAMPLES, expected.terms, True)
    assert torch.equal(rows.identifiers, expected.identifiers)
    for name, array in expected["grad_batch"].items():
        assert torch.equal(rows["grad_batch", name].torch(), array.torch())
    with pytest.raises(BadInput, match="other"):
        stored(None, None, checkpoint=kept)


RANDOM = [form for form in FORMS if "draw" in form or "shuffled" in form]


@thorough
@pytest.mark.parametrize("looked", [False, True], ids=["", "looked at"])
@pytest.mark.parametrize("form", RANDOM)
def test_a_store_meets_the_data_of_an_uninterrupted_run(
    form: str, looked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the second checkpoint, and after some more; a kill keeps nothing on its way out."""
    monkeypatch.setattr(Checkpoint, "lacks", lambda *_: False)

    def looked_at() -> Batches:
        """As a profile does, before it asks for the run."""
        given = Batches("", FORMS[form](*samples()), SIZE if form in BY_SAMPLE else None)
        given.first()
        return given

    def stored(name: str, fails: int | None, **options: Any) -> Result:
        return run(form, fails, data=looked_at if looked else None, store=tmp_path / name, **options)[0]

    def rows(name: str) -> list[Tensor]:
        return [array.torch() for array in Store(tmp_path / name)["grad_batch"].values()]

    alone = stored("alone", None)
    for every, kills in (("1h", (1, 2)), (1, (2, 3, 2)), ("1h", (1, 3))):
        name = f"{every}-{len(kills)}-{kills[1]}"
        options = {"checkpoint": tmp_path / f"kept-{name}", "every": every}
        for fails in kills:
            with pytest.raises(KeyboardInterrupt):
                stored(name, fails, **options)
        assert same(stored(name, None, **options), alone)
        assert all(map(torch.equal, rows(name), rows("alone")))


@thorough
def test_by_the_clock_a_fiftieth_of_the_time_goes_to_checkpoints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also of what is done before files are written, and where that fails."""
    now, written = [0.0], []
    write, saved = Folder.write, MergedResults.saved

    def passing(function: Any, seconds: float) -> Any:
        def slow(*given: Any) -> Any:
            now[0] += seconds
            return function(*given)

        return slow

    def noted(*given: Any) -> None:
        written.append(now[0])
        if len(written) == 3:
            raise OSError("the disk is full")
        write(*given)

    monkeypatch.setattr(checkpoint, "clock", lambda: now[0])
    monkeypatch.setattr(Folder, "write", passing(noted, 1))
    monkeypatch.setattr(MergedResults, "saved", passing(saved, 3))

    def batches() -> Iterator[Any]:
        for _ in range(1000):
            now[0] += 1
            yield torch.ones(2, 3), torch.zeros(2, 2)

    with pytest.warns(PackpropWarning, match="the disk is full"):
        packprop.compute(
            nn.Linear(3, 2),
            nn.MSELoss(),
            batches(),
            [extensions.Variance()],
            checkpoint=tmp_path,
            progress=False,
        )
    apart = [later - before for before, later in itertools.pairwise(written)]
    assert written[0] < 40  # every="30s"
    assert all(each >= 200 for each in apart[:-1])  # the last one is at the end
    assert len(written) == 6


@pytest.mark.parametrize("fails", [2, None])
def test_random_states_that_nothing_was_drawn_from_stay(fails: int | None, tmp_path: Path) -> None:
    """In another process than the run began in, with a seed of its own; the run is complete, or goes on."""
    model = Breaking(fails).eval()

    def states() -> list[str]:
        drawn = np.random.get_state(legacy=False)  # noqa: NPY002  # it belongs to users
        return [str(torch.get_rng_state().tolist()), str(random.getstate()), str(drawn)]

    def run(seed: int) -> bool:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002  # as users do
        before, ended = states(), False
        try:
            options: dict[str, Any] = {"batch_size": SIZE, "checkpoint": tmp_path, "every": 1}
            compute(model, nn.CrossEntropyLoss(), samples(), extensions.Variance(), **options)
            ended = True
        except KeyboardInterrupt:
            pass
        assert states() == before
        return ended

    assert run(1) == (fails is None)
    assert run(2)
