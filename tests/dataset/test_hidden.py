"""Generators anywhere in a program are kept: a run that was ended draws what one left alone draws."""

from __future__ import annotations

import functools
import importlib
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

import packprop
from packprop import extensions
from packprop.applications.dataset.checkpoint import Checkpoint
from packprop.applications.dataset.hidden import generators_in
from packprop.applications.dataset.result import Result
from tests.dataset.kills import same
from tests.dataset.test_checkpoint import SAMPLES, SIZE, samples
from tests.dataset.test_forms import Pairs
from tests.selection import one_in

INSTALLED = """
import random

import numpy as np
from torch.utils.data import Dataset


class Noise:
    def __init__(self):
        self._draws = np.random.default_rng(1)

    def __call__(self):
        return float(self._draws.normal())


class Composed:
    def __init__(self, *parts):
        self._parts = parts

    def __call__(self):
        return sum(part() for part in self._parts)


class Base(Dataset):
    def __init__(self):
        self._source = random.Random(3)

    def draw(self):
        return self._source.gauss(0, 1)
"""


class Noisy(Pairs):
    """Samples that a function changes."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__(*samples())
        self.draw = draw

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + 0.1 * self.draw(), y


class Begun(Pairs):
    """A generator that code may also assign is no option, and is kept all the same."""

    def __init__(self) -> None:
        super().__init__(*samples())
        self.source = random.Random(2)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == SAMPLES:
            self.source = random.Random(3)
        x, y = super().__getitem__(index)
        return x + self.source.gauss(0, 1), y


class DrawnByWorkers(Pairs):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + torch.randn(3).double() + random.gauss(0, 1), y


def installed(place: Path, patch: pytest.MonkeyPatch) -> Any:
    (place / "site-packages").mkdir(exist_ok=True)
    (place / "site-packages" / "noise_of_others.py").write_text(INSTALLED)
    patch.syspath_prepend(place / "site-packages")
    return importlib.import_module("noise_of_others")


def derived(noise: Any) -> Any:
    class Derived(noise.Base):  # type: ignore[misc]  # a class that is made here
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            x, y = samples()
            return x[index] + self.draw(), y[index]

    return Derived()


def by_workers(**options: Any) -> Any:
    return DataLoader(DrawnByWorkers(*samples()), SIZE, shuffle=True, num_workers=1, **options)


DATA: dict[str, Callable[[Any], Any]] = {
    "private, of an installed class": lambda noise: Noisy(noise.Noise()),
    "in a private list": lambda noise: Noisy(noise.Composed(noise.Noise(), noise.Noise())),
    "of a base that is installed": derived,
    "a method of one of numpy": lambda _: Noisy(np.random.default_rng(3).normal),
    "a method of one of Python": lambda _: Noisy(functools.partial(random.Random(3).gauss, 0, 1)),
    "a built-in method": lambda _: Noisy(random.Random(3).random),
    "that code may assign": lambda _: Begun(),
    "workers": lambda _: by_workers(),
    "workers that stay": lambda _: by_workers(persistent_workers=True),
}


class Drawing(nn.Module):
    """A model, or a loss, that draws from a generator of its own; fails in one of its calls."""

    def __init__(self, kind: str, fails: int | None) -> None:
        super().__init__()
        made: dict[str, Callable[[], Any]] = {
            "torch": lambda: torch.Generator().manual_seed(1),
            "numpy": lambda: np.random.default_rng(1),
            "Python": lambda: random.Random(1),
        }
        self.kind, self.left = kind, fails
        self._source = made.get(kind, lambda: None)()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        self.left = None if self.left is None else self.left - 1
        if self.left == 0:
            raise KeyboardInterrupt
        drawn: Any = 0.0
        if self.kind == "torch":
            drawn = torch.randn(len(x), 1, generator=self._source).double()
        elif self.kind == "numpy":
            drawn = torch.from_numpy(self._source.normal(size=(len(x), 1)))
        elif self.kind == "Python":
            drawn = self._source.gauss(0, 1)
        x = x + drawn
        return x if y is None else nn.functional.cross_entropy(x, y)


def run(data: Any, fails: int | None = None, model: str = "", loss: str = "", **options: Any) -> Result:
    torch.manual_seed(4)
    random.seed(4)
    np.random.seed(4)  # noqa: NPY002  # what functions draw from
    layers = nn.Sequential(Drawing(model, fails), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    asked = [extensions.BatchL2Grad(), extensions.EKFAC(mc_samples=2)]
    size = {} if isinstance(data, DataLoader) else {"batch_size": SIZE}
    options = {"progress": False, "compiled": False, **size, **options}
    return packprop.compute(
        layers, Drawing(loss, None) if loss else nn.CrossEntropyLoss(), data, asked, **options
    )


def ended_and_gone_on(make: Callable[[], Any], folder: Path, **options: Any) -> Iterator[Result]:
    """Ended in the first reading, in the second one, and before the second checkpoint; a kill keeps nothing."""
    for number, (every, kills) in enumerate(((1, (3, 5)), ("1h", (7,)))):
        for fails in kills:
            with pytest.raises(KeyboardInterrupt):
                run(make(), fails, checkpoint=folder / str(number), every=every, **options)
        yield run(make(), checkpoint=folder / str(number), every=every, **options)


@one_in(5)
@pytest.mark.filterwarnings("ignore:packprop cannot tell")
@pytest.mark.parametrize("form", DATA)
def test_data_draw_on(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "lacks", lambda *_: False)
    noise = installed(tmp_path, monkeypatch)
    alone = run(DATA[form](noise))
    for found in ended_and_gone_on(lambda: DATA[form](noise), tmp_path):
        assert same(found, alone)


@one_in(5)
@pytest.mark.parametrize("kind", ["torch", "numpy", "Python"])
@pytest.mark.parametrize("place", ["model", "loss"])
def test_models_and_losses_draw_on(
    kind: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both readings draw the same, too: so values are those without a checkpoint."""
    monkeypatch.setattr(Checkpoint, "lacks", lambda *_: False)
    options: dict[str, Any] = {place: kind}
    if place == "loss":
        options["losses"] = False
    alone = run(Pairs(*samples()), **options)
    for found in ended_and_gone_on(lambda: Pairs(*samples()), tmp_path, **options):
        assert same(found, alone)


@pytest.mark.filterwarnings("ignore:packprop cannot tell")
def test_a_profile_draws_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at a batch before it asks for the run."""
    monkeypatch.setattr(Checkpoint, "lacks", lambda *_: False)

    def profile(fails: int | None, **options: Any) -> Any:
        torch.manual_seed(4)
        model = nn.Sequential(Drawing("", fails), nn.Linear(3, 2)).double()
        data = Noisy(random.Random(3).random)
        loss = nn.CrossEntropyLoss()
        found = packprop.profile(model, loss, data, batch_size=SIZE, progress=False, outliers=0, **options)
        return [row.gradient_norm for row in found.layers]

    alone = profile(None)
    with pytest.raises(KeyboardInterrupt):
        profile(4, checkpoint=tmp_path, every=1)
    assert profile(None, checkpoint=tmp_path, every=1) == alone


def test_where_generators_are_found() -> None:
    """Each once; none in what is long beyond measure, lazy, or holds itself."""

    class Slotted:
        __slots__ = ("inside", "unset")

        def __init__(self, inside: Any) -> None:
            self.inside = inside

    ours = [random.Random(number) for number in range(7)]
    circle: list[Any] = [ours[0], {"key": (ours[1], ours[0])}]
    circle.append(circle)
    values = [
        circle,
        Slotted({"key": [ours[2]]}),
        functools.partial(print, ours[3], end=ours[4]),
        lambda by=ours[5]: (by, ours[6]),
        ours[6].random,
        itertools.count(),
        dict.fromkeys(range(10**6)),
        torch.ones(3),
    ]
    assert {id(each) for each in generators_in(values)} == {id(each) for each in ours}
    assert len([*generators_in(values)]) == len(ours)


def test_generators_behind_many_values_are_found() -> None:
    first, last, alone = (random.Random(number) for number in range(3))
    many = [[number] for number in range(10_000)]
    values = [{"objects": [*many, first], "numbers": [*range(10_000), last]}, alone]
    assert {id(each) for each in generators_in(values)} == {id(first), id(last), id(alone)}


class WithoutLength(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(*samples(), strict=True)


@one_in(5)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_data_without_a_length(compiled: bool, workers: int) -> None:
    """Whether a graph pays is asked of how many batches are to come, which nobody knows."""
    expected = run(samples())
    staying = {"num_workers": workers, "persistent_workers": bool(workers)}
    whole: Any = DataLoader(WithoutLength(), SIZE, drop_last=False, **staying)
    assert same(run(whole, compiled=compiled), expected)
    ready: Any = DataLoader([*zip(*(each.split(SIZE) for each in samples()), strict=True)], None, **staying)  # type: ignore[arg-type,misc]  # a list of batches
    assert same(run(ready, compiled=compiled), expected)
    places = BatchSampler(SequentialSampler(range(SAMPLES)), SIZE, False)
    assert same(
        run(DataLoader(Pairs(*samples()), batch_sampler=places, **staying), compiled=compiled), expected
    )
