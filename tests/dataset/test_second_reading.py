"""EKFAC over a data set, which is read twice: the values are those of one batch of all samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import packprop
from packprop import PackpropError, extensions, kronecker
from packprop.applications.dataset.result import Result
from packprop.engine.tensors.nesting import tensors_in
from packprop.extensions.kronecker import EIGENVALUE_DRAWS
from packprop.types import Seed
from tests.cases import Case
from tests.dataset.small import SIZE, SPLIT_CASES, compute, part
from tests.dataset.test_forms import Pairs
from tests.references.running import assert_near, backward, results
from tests.selection import often, one_in


@one_in(5)
@often(lambda case, fisher: fisher == "exact")
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("case", SPLIT_CASES, ids=lambda case: case.name)
def test_the_values_are_those_of_one_batch(case: Case, fisher: Any) -> None:
    problem, whole = case.problem(SIZE), case.problem(SIZE)
    cuts = [(0, 3), (3, 4), (4, SIZE)]
    data = [(part(problem.inputs, *cut), part(problem.targets, *cut)) for cut in cuts]
    found = compute(problem.model, problem.loss, data, extensions.EKFAC(fisher=fisher))["ekfac"]
    backward(whole, extensions.EKFAC(fisher=fisher), record=True)
    for name, expected in results(whole, "ekfac").items():
        assert_near(kronecker.dense(found[name]), kronecker.dense(expected), name)


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2)).double()


def samples(count: int = 23) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 3, generator=source).double()
    return inputs, torch.randint(2, (count,), generator=source)


LOADERS: dict[str, Callable[[], Any]] = {
    "tensors": samples,
    "shuffled": lambda: DataLoader(Pairs(*samples()), 5, shuffle=True),
    "shuffled by a generator": lambda: DataLoader(
        Pairs(*samples()), 5, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
}


class FreshBatchDiagGGNMC(extensions.BatchDiagGGNMC):
    """What the draws that eigenvalues come from make of each sample."""

    @property
    def seed(self) -> Seed:
        return replace(super().seed, mc_samples=EIGENVALUE_DRAWS * self.mc_samples, fresh=True)


@one_in(2)
@pytest.mark.parametrize("own", [True, False], ids=["own generator", "global generator"])
@pytest.mark.parametrize("loader", LOADERS)
def test_both_readings_draw_the_same(loader: str, own: bool) -> None:
    """The eigenvalues sum to the trace of the block that the same fresh draws make in the first reading.

    Dropout is on, data are shuffled, and other extensions draw from the same generator, before and after.
    """
    source = torch.Generator().manual_seed(5) if own else None
    asked = [
        extensions.DiagGGNMC(mc_samples=3, generator=source),
        extensions.DiagHessianMC(generator=source),
        extensions.EKFAC(mc_samples=2, generator=source),
        FreshBatchDiagGGNMC(mc_samples=2, generator=source),
    ]
    model = network().train()
    torch.manual_seed(4)
    found = compute(model, nn.CrossEntropyLoss(), LOADERS[loader](), *asked)
    for name, rows in found["diag_ggn_mc_batch"].items():
        assert isinstance(rows, Tensor)
        torch.testing.assert_close(found["ekfac"][name].values.sum(), rows.sum())


def test_one_batch_draws_what_a_single_pass_draws() -> None:
    x, y = samples()
    asked = [extensions.EKFAC(2, generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    model, loss = packprop.extend(network().eval()), packprop.extend(nn.CrossEntropyLoss())
    found = compute(model, loss, (x, y), asked[0], batch_size=len(x))["ekfac"]
    with packprop.backpack(asked[1]):
        loss(model(x), y).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name].values, parameter.ekfac.values)


def test_what_is_drawn_is_what_it_was() -> None:
    """The second reading leaves the generators where the first one left them."""

    def after(*asked: Any) -> tuple[Tensor, Result]:
        torch.manual_seed(7)
        found = compute(network(), nn.CrossEntropyLoss(), samples(), *asked, batch_size=5)
        return torch.rand(3), found

    numbers, twice = after(extensions.KFAC(mc_samples=2), extensions.EKFAC(mc_samples=2))
    expected, once = after(extensions.KFAC(mc_samples=2), FreshBatchDiagGGNMC(mc_samples=2))
    assert torch.equal(numbers, expected)
    for name, factors in once["kfac"].items():
        assert all(map(torch.equal, factors, twice["kfac"][name]))


class Vanishing:
    """Data that lose a batch each time they are read."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        self.batches, read = self.batches[:-1], self.batches
        return iter(read)


def test_a_second_reading_of_other_data_is_refused() -> None:
    x, y = samples()
    data = Vanishing([*zip(x.split(5), y.split(5), strict=True)])
    with pytest.raises(PackpropError, match="had 20 samples"):
        compute(network().eval(), nn.CrossEntropyLoss(), data, extensions.EKFAC(fisher="exact"))


def test_nothing_but_the_last_row_is_computed_again(monkeypatch: Any) -> None:
    from packprop.applications.dataset import batch_pass

    asked: list[list[str]] = []

    class Spy(batch_pass.BackwardPass):
        def __init__(self, request: Any, done: Any, log: Any) -> None:
            asked.append([f"{each.name} {len(each.rows)}" for each in request.extensions])
            super().__init__(request, done, log)

    monkeypatch.setattr(batch_pass, "BackwardPass", Spy)
    both = extensions.Variance(), extensions.EKFAC(fisher="exact")
    compute(network().eval(), nn.CrossEntropyLoss(), samples(), *both, batch_size=12)
    assert asked == [["Variance 1", "EKFAC 4"]] * 2 + [["EKFAC 1"]] * 2


def test_saved_and_loaded(tmp_path: Any) -> None:
    """Eigenvectors, and the order of entries, of weights that keep fan-in first, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(2, 3, 2, groups=1), nn.Flatten(), nn.Linear(27, 2)).double()
    data = torch.randn(6, 2, 2, 2).double(), torch.randint(2, (6,))
    found = compute(model, nn.CrossEntropyLoss(), data, extensions.EKFAC(fisher="exact"), batch_size=4)
    found.save(tmp_path / "result.safetensors")
    again = packprop.Result.load(tmp_path / "result.safetensors")
    for name, block in found["ekfac"].items():
        loaded, vectors = again["ekfac"][name], torch.randn(2, *model.get_parameter(name).shape).double()
        assert all(map(torch.equal, tensors_in(loaded), tensors_in(block)))
        torch.testing.assert_close(kronecker.multiply(loaded, vectors), kronecker.multiply(block, vectors))


def test_terms_that_are_weights_may_be_added_up_in_another_order() -> None:
    """A loader that orders samples anew in each reading, by numbers that are not torch's."""
    x, y = samples()
    readings: list[int] = []

    class Reordered:
        def __iter__(self) -> Iterator[Any]:
            readings.append(len(readings))
            order = torch.arange(23) if len(readings) == 1 else torch.arange(23).flip(0)
            return zip(x[order].split(3), y[order].split(3), strict=True)

    weight = torch.tensor([0.1, 0.7]).double()
    asked = extensions.EKFAC(fisher="exact")
    found = compute(network().eval(), nn.CrossEntropyLoss(weight), Reordered(), asked)["ekfac"]
    expected = compute(network().eval(), nn.CrossEntropyLoss(weight), (x, y), asked)["ekfac"]
    assert readings == [0, 1]
    for name, block in expected.items():
        assert_near(kronecker.dense(found[name]), kronecker.dense(block), name)
