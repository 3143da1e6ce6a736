"""Graphs in place of passes over batches: where it pays, with the values of ordinary passes."""

from __future__ import annotations

import dataclasses
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.applications.compiled.replayer import Kind
from packprop.applications.dataset import replays
from packprop.applications.dataset.identity import describer_of
from packprop.applications.dataset.replays import MANY, WhereItPays, told
from packprop.errors import PackpropWarning
from tests.references.running import assert_near
from tests.selection import often, thorough

BATCHES = MANY + 20
ASKED = (
    extensions.BatchGrad(),
    extensions.BatchL2Grad(),
    extensions.Variance(),
    extensions.SumGradSquared(),
    extensions.DiagGGNExact(),
    extensions.DiagHessian(),
    extensions.KFAC(),
)


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of compilers are those of a slow one, unless a test says otherwise; graphs are made and kept."""
    monkeypatch.setattr(replays, "FIXED_SECONDS", math.inf)
    monkeypatch.setattr(replays, "TRACE_SECONDS", 0.0)
    monkeypatch.setattr(WhereItPays, "keeps", lambda self, kind: True)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Sigmoid(), nn.Linear(7, 3)).double()


def data(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 5).double(), torch.randint(3, (samples,))


def both(model: nn.Module, loss: Any, *asked: Any, size: int = 4, last: int = 1, **options: Any) -> Any:
    """Values with graphs and without."""
    given = data(size * BATCHES + last)
    found = []
    for compiled in (True, False):
        torch.manual_seed(3)
        run = packprop.compute(
            model, loss, given, asked, batch_size=size, progress=False, compiled=compiled, **options
        )
        found.append(run)
    return found


@thorough
def test_values_are_those_of_passes() -> None:
    own, other = both(network(), nn.CrossEntropyLoss(), *ASKED)
    assert other.replays is None
    assert "ordinary passes" in own.replays
    assert int(own.replays.split(" replays")[0].rpartition(" ")[2]) >= BATCHES - 10
    assert own.samples == other.samples
    assert own.loss == pytest.approx(other.loss, rel=1e-12)
    for savefield, by_name in other.items():
        for name, value in by_name.items():
            if savefield != "kfac":  # drawn at random
                assert_near(own[savefield][name], value, f"{savefield} of {name}")


def test_draws_are_those_of_passes() -> None:
    own, other = both(network(), nn.CrossEntropyLoss(), extensions.DiagGGNMC())
    assert own.replays is not None
    for name, value in other["diag_ggn_mc"].items():
        assert_near(own["diag_ggn_mc"][name], value, name)


@thorough
def test_weights_of_terms_and_sums() -> None:
    asked = (extensions.BatchL2Grad(), extensions.Variance(), extensions.DiagGGNExact())
    for loss in (
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3]).double()),
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(reduction="sum"),
    ):
        own, other = both(network(), loss, *asked)
        assert own.replays is not None
        assert own.loss == pytest.approx(other.loss, rel=1e-12)
        for savefield, by_name in other.items():
            for name, value in by_name.items():
                assert_near(own[savefield][name], value, f"{savefield} of {name}, {loss}")


@thorough
def test_two_readings() -> None:
    own, other = both(network(), nn.CrossEntropyLoss(), extensions.EKFAC(mc_samples=2))
    assert own.replays is not None
    for name, value in other["ekfac"].items():
        assert_near(own["ekfac"][name].values, value.values, name)


@thorough
def test_a_store_gets_the_same_rows(tmp_path: Path) -> None:
    given, model = data(4 * BATCHES), network()
    for compiled in (True, False):
        found = packprop.compute(
            model,
            nn.CrossEntropyLoss(),
            given,
            [extensions.BatchGrad()],
            batch_size=4,
            progress=False,
            store=tmp_path / str(compiled),
            compiled=compiled,
        )
        assert (found.replays is not None) == compiled
    own, other = (packprop.Store(tmp_path / str(compiled)) for compiled in (True, False))
    for name, _ in model.named_parameters():
        assert_near(own["grad_batch", name].torch(), other["grad_batch", name].torch(), name)


def test_few_batches_are_not_traced() -> None:
    model = network()
    found = packprop.compute(
        model, nn.CrossEntropyLoss(), data(4 * 90), [extensions.BatchL2Grad()], batch_size=4, progress=False
    )
    assert found.replays is None


@thorough
def test_nothing_is_traced_under_a_budget_or_with_a_checkpoint(tmp_path: Path) -> None:
    asked = [extensions.BatchL2Grad()]
    for options in ({"memory": "1GiB"}, {"checkpoint": tmp_path / "kept"}):
        found = packprop.compute(
            network(), nn.CrossEntropyLoss(), data(4 * BATCHES), asked, batch_size=4, progress=False, **options
        )
        assert found.replays is None


@thorough
def test_what_cannot_be_traced_is_no_matter() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) if x[0, 0] > -100 else self.net(-x)

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls = network(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.net(x)

    for model in (Deciding(), Counting()):
        with warnings.catch_warnings():
            warnings.simplefilter("error", PackpropWarning)
            own, other = both(model, nn.CrossEntropyLoss(), extensions.BatchL2Grad())
        assert own.replays is None
        for name, value in other["batch_l2"].items():
            assert torch.equal(own["batch_l2"][name], value)


class Options:
    shift = 1.0


SCALE, TABLE = [1.0], {"scale": 1.0}


def scaled(outputs: Tensor, targets: Tensor) -> Tensor:
    factor = SCALE[0] * TABLE["scale"] * Options.shift
    return nn.functional.cross_entropy(outputs * factor, targets)


class Changing(list[Any]):
    """Batches between which something changes that the loss reads."""

    def __init__(self, given: Any, change: Any) -> None:
        super().__init__(given)
        self.change = change

    def __iter__(self) -> Any:
        for number, batch in enumerate(super().__iter__()):
            self.change(1.0 + (number % 50 >= 40))
            yield batch


CHANGES: dict[str, Any] = {
    "list": lambda by: SCALE.__setitem__(0, by),
    "table": lambda by: TABLE.update(scale=by),
    "class": lambda by: setattr(Options, "shift", by),
    "global": lambda by: globals().update(SCALE=[by]),
}


@often(lambda change: change == "list")
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_loss_reads_may_change_between_batches(change: str) -> None:
    torch.manual_seed(0)
    given = [data(4) for _ in range(2 * BATCHES)]
    model = network()
    own, other = (
        packprop.compute(
            model,
            scaled,
            Changing(given, CHANGES[change]),
            [extensions.SumGradSquared()],
            progress=False,
            compiled=compiled,
        )
        for compiled in (True, False)
    )
    CHANGES[change](1.0)
    assert own.replays is not None
    assert own.loss == pytest.approx(other.loss, rel=1e-12)
    for name, value in other["sum_grad_squared"].items():
        assert_near(own["sum_grad_squared"][name], value, name, 1e-9)


class Settings:
    class Inner:
        factor = 1.0


class InClass(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * Settings.Inner.factor


class HoldsClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings

    def forward(self, x: Tensor) -> Tensor:
        return x * self.settings.Inner.factor


class ByName(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = getattr(self, "by" + "_scale")(x)
        return found

    def by_scale(self, x: Tensor) -> Tensor:
        return x * SCALE[0]


class Imports(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        from tests.dataset import test_replays

        return x * test_replays.SCALE[0]


class ByText(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * globals()["SCALE"][0]


@often(lambda layer: layer is ByName)
@pytest.mark.parametrize("layer", [InClass, HoldsClass, ByName, Imports, ByText])
def test_what_an_inner_layer_reads_may_change_between_batches(layer: type[nn.Module]) -> None:
    torch.manual_seed(0)
    given = [data(4) for _ in range(2 * BATCHES)]
    model = nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Sigmoid(), layer()), nn.Linear(7, 3)).double()

    def change(by: float) -> None:
        SCALE[0] = Settings.Inner.factor = by

    loss, asked = nn.CrossEntropyLoss(), [extensions.SumGradSquared()]
    own, other = (
        packprop.compute(model, loss, Changing(given, change), asked, progress=False, compiled=compiled)
        for compiled in (True, False)
    )
    change(1.0)
    assert (own.replays is None) == (layer in (Imports, ByText))
    assert own.loss == pytest.approx(other.loss, rel=1e-12)
    for name, value in other["sum_grad_squared"].items():
        assert_near(own["sum_grad_squared"][name], value, name, 1e-9)


def test_a_model_that_reads_nothing_around_it_compares_nothing() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.width = nn.Linear(5, 3), 3

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)[:, : self.width]

    assert not describer_of(nn.Sequential(Plain(), network()), nn.CrossEntropyLoss()).around


def test_faulty_data_are_found() -> None:
    given, targets = data(4 * BATCHES)
    given[4 * (BATCHES - 3)] = math.nan
    with pytest.warns(PackpropWarning, match="NaN"):
        packprop.compute(
            network(),
            nn.CrossEntropyLoss(),
            (given, targets),
            [extensions.BatchGrad()],
            batch_size=4,
            progress=False,
        )


def kind(**facts: Any) -> Kind:
    made = Kind("")
    return dataclasses.replace(made, **facts)


class Graph:
    operations, seconds = 100, 0.5


def test_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    traced: Any = Graph()
    policy = WhereItPays(lambda: 1000, lambda: False)
    assert not policy.traces(kind(passes=3, pass_seconds=0.002))
    assert policy.traces(kind(passes=4, pass_seconds=0.002))
    assert not WhereItPays(lambda: MANY - 1, lambda: False).traces(kind(passes=4, pass_seconds=0.002))
    # 400 replays of a pass of 0.1 s save 3.2 s, 600 save 4.8 s; tracing may take 4 s
    assert not WhereItPays(lambda: 400, lambda: False).traces(kind(passes=4, pass_seconds=0.1))
    assert WhereItPays(lambda: 600, lambda: False).traces(kind(passes=4, pass_seconds=0.1))
    assert not WhereItPays(lambda: 600, lambda: True).traces(kind(passes=4, pass_seconds=0.1))
    # 1,000 replays of 0.02 s, of which a third is saved, are more than 5.5 s; of 0.01 s they are less
    assert policy.compiles(kind(traced=traced, replays=3, replay_seconds=0.02))
    assert not policy.compiles(kind(traced=traced, replays=3, replay_seconds=0.01))
    assert not policy.compiles(kind(traced=traced, replays=2, replay_seconds=0.02))
    assert policy.keeps(kind(replays=3, replay_seconds=1.0, pass_seconds=1.1))
    assert not policy.keeps(kind(replays=3, replay_seconds=1.1, pass_seconds=1.1))


def test_what_is_told() -> None:
    traced: Any = Graph()
    assert told([kind(passes=7)]) is None
    one = kind(passes=5, traced=traced, replays=1000, replay_seconds=0.01, pass_seconds=0.0305)
    assert told([one]) == "5 ordinary passes, 1,000 replays of graphs, traced in 0.5 s: about 20 s saved"
    other = kind(passes=5, traced=traced, replays=3, replay_seconds=0.01, pass_seconds=0.01)
    assert told([other]) == "5 ordinary passes, 3 replays of graphs, traced in 0.5 s: about 0.5 s lost"
