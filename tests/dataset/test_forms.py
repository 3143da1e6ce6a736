"""Forms of data, and what is left as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import packprop
from packprop import BadInput, PackpropError, extensions
from packprop.applications.dataset.batches import Batches
from packprop.applications.dataset.result import Result
from packprop.engine.recording.switch import is_extended
from tests.dataset.small import EXACT, SIZE, compute, small
from tests.references.running import assert_all_near, assert_near
from tests.selection import one_in


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """A data set that hands out one sample at a time."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "pair": lambda x, y: (x, y),
    "pair in a list": lambda x, y: [x, y],
    "TensorDataset": TensorDataset,
    "Dataset": Pairs,
    "DataLoader": lambda x, y: DataLoader(Pairs(x, y), batch_size=3),
    "list of lists": lambda x, y: [[x[:2], y[:2]], [x[2:], y[2:]]],
    "generator": lambda x, y: ((x[i : i + 1], y[i : i + 1]) for i in range(len(x))),
    "keywords": lambda x, y: [({"input": x}, y)],
    "arguments": lambda x, y: [((x,), y)],
    "all arguments": lambda x, y: ((x,), y),
    "all arguments in a list": lambda x, y: ([x], y),
    "all keywords": lambda x, y: ({"input": x}, y),
}


class Two(nn.Module):
    """Takes two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.head = nn.Embedding(3, 2), nn.Linear(4, 3)

    def forward(self, kinds: Tensor, numbers: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat([self.kinds(kinds), numbers], 1))
        return out


def two_arguments() -> tuple[nn.Module, tuple[tuple[Tensor, Tensor], Tensor]]:
    torch.manual_seed(0)
    inputs = torch.randint(3, (7,)), torch.randn(7, 2)
    return Two(), (inputs, torch.randint(3, (7,)))


def test_several_inputs_and_targets_are_data_as_they_are_a_batch(tmp_path: Path) -> None:
    """What ``plan`` takes, ``compute`` and ``influence`` take, in batches of any size."""
    model, data = two_arguments()
    loss, asked = nn.CrossEntropyLoss(), extensions.BatchGrad()
    assert packprop.plan(model, loss, data, asked).samples == 7
    expected = packprop.compute(model, loss, [data], asked, progress=False)["grad_batch"]
    for size in (2, None):
        found = packprop.compute(model, loss, data, asked, batch_size=size, progress=False)["grad_batch"]
        assert_all_near(found, expected, f"batches of {size}", 1e-5)
    packprop.compute(model, loss, data, asked, store=tmp_path / "rows", progress=False)
    assert packprop.influence(tmp_path / "rows", model, loss, data, k=1).largest.rows.shape == (7, 1)


def test_several_inputs_of_unequal_length_are_refused() -> None:
    model, ((kinds, numbers), targets) = two_arguments()
    for data in (((kinds, numbers[1:]), targets), ((kinds, numbers), targets[1:])):
        with pytest.raises(BadInput, match=r"(?s)\[6.*same number of samples") as caught:
            packprop.compute(model, nn.CrossEntropyLoss(), data, extensions.BatchGrad())
        assert "((a, b), targets)" in str(caught.value)


def test_mappings_that_cannot_be_mapped_are_no_data() -> None:
    """Each sample would hold all of them."""
    x, y = torch.randn(6, 3), torch.randint(2, (6,))
    model = nn.Linear(3, 2)
    with pytest.raises(PackpropError):
        packprop.compute(
            model, nn.CrossEntropyLoss(), (MappingProxyType({"input": x}), y), [extensions.BatchL2Grad()]
        )


def test_names_that_are_no_keyword_arguments_are_refused_like_any_others() -> None:
    x, y = torch.randn(6, 3), torch.randint(2, (6,))
    for inputs in ({0: x, 1: x}, {"self": x, "input": x}):
        with pytest.raises(BadInput, match=r"batch 1 of the data"):
            packprop.compute(nn.Linear(3, 2), nn.CrossEntropyLoss(), (inputs, y), [extensions.BatchL2Grad()])


def test_a_flat_tuple_of_inputs_and_targets_is_refused_with_the_form_that_works() -> None:
    model, ((kinds, numbers), targets) = two_arguments()
    data: Any = (kinds, numbers, targets)
    with pytest.raises(BadInput, match=re.escape("((a, b), targets)")):
        packprop.compute(model, nn.CrossEntropyLoss(), data, extensions.BatchGrad())


def test_without_a_loss_a_list_holds_batches_and_a_tuple_arguments() -> None:
    """The model may have a second argument with a default, so that both would run."""
    torch.manual_seed(0)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            return nn.functional.mse_loss(self.layer(x), x if y is None else y)

    model, x = Whole(), torch.randn(6, 3)
    expected = packprop.compute(model, None, [x], extensions.SumGradSquared(), progress=False)
    for data in ([x[:3], x[3:]], [x[:2], x[2:4], x[4:]], [x[:4], x[4:]]):
        found = packprop.compute(model, None, data, extensions.SumGradSquared(), progress=False)
        assert found.samples == 6
        assert_all_near(found["sum_grad_squared"], expected["sum_grad_squared"], "batches", 1e-5)
    assert packprop.compute(model, None, (x, x), extensions.SumGradSquared(), progress=False).samples == 6


class Halved(TensorDataset):
    """Takes many samples at once, as a loader asks for them."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, ...]]:
        x, y = (tensor[indices] for tensor in self.tensors)
        return [*zip(x / 2, y, strict=True)]


def test_a_data_set_that_takes_many_samples_at_once() -> None:
    model, (x, y) = small()
    asked = extensions.SumGradSquared()
    expected = compute(model, nn.CrossEntropyLoss(), [(x / 2, y)], asked)
    found = compute(model, nn.CrossEntropyLoss(), Halved(x, y), asked)
    assert_all_near(found["sum_grad_squared"], expected["sum_grad_squared"], "halves", 1e-5)


class Shortened(TensorDataset):
    """Hides its last samples."""

    def __len__(self) -> int:
        return 4


def test_a_data_set_says_how_many_samples_it_has() -> None:
    model, (x, y) = small()
    found = packprop.compute(
        model, nn.CrossEntropyLoss(), Shortened(x, y), extensions.SumGradSquared(), progress=False
    )
    assert found.samples == 4


@one_in(2)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_same(form: str) -> None:
    model, (x, y) = small()
    asked = [make() for make in EXACT]
    expected = compute(model, nn.CrossEntropyLoss(), [(x, y)], *asked)
    found = compute(model, nn.CrossEntropyLoss(), FORMS[form](x, y), *asked)
    for savefield in expected:
        assert_all_near(found[savefield], expected[savefield], savefield)


@pytest.mark.parametrize(("given", "counts"), [(None, [128, 72]), (90, [90, 90, 20])])
@pytest.mark.parametrize("form", [TensorDataset, Pairs, lambda x, y: (x, y)])
def test_batch_size(form: Any, given: int | None, counts: list[int]) -> None:
    batches = Batches("asked", form(torch.randn(200, 3), torch.zeros(200)), given)
    assert [len(x) for x, _ in batches] == counts


def test_nothing_of_the_users_is_changed() -> None:
    model, (x, y) = small()
    loss = nn.CrossEntropyLoss()
    loss(model(x), y).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    attributes = {name: set(vars(p)) for name, p in model.named_parameters()}
    packprop.extend(model[2])
    compute(model, loss, (x, y), extensions.BatchGrad(), batch_size=2)
    assert [is_extended(module) for module in model] == [False, False, True]
    assert not is_extended(model)
    assert not is_extended(loss)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, before[name])
        assert set(vars(parameter)) == attributes[name]


def test_an_error_leaves_the_model_as_it_was() -> None:
    model, (x, y) = small()
    with pytest.raises(BadInput):
        compute(model, nn.CrossEntropyLoss(), [(x, y), (x[:, :2], y)], extensions.BatchGrad())
    assert not any(is_extended(module) for module in model.modules())


def test_saved_and_loaded(tmp_path: Path) -> None:
    model, (x, y) = small()
    asked = [extensions.BatchGrad(), extensions.KFAC()]
    found = compute(model, nn.CrossEntropyLoss(reduction="sum"), (x, y), *asked)
    found.save(tmp_path / "result.safetensors")
    again = Result.load(tmp_path / "result.safetensors")
    assert (again.samples, again.loss, again.reduction) == (SIZE, found.loss, "sum")
    assert list(again) == list(found)
    assert_all_near(again["grad_batch"], found["grad_batch"], "grad_batch")
    for name, factors in found["kfac"].items():
        assert isinstance(again["kfac"][name], list)
        for saved, factor in zip(again["kfac"][name], factors, strict=True):
            assert torch.equal(saved, factor)


def test_no_progress_bar_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    model, (x, y) = small()
    packprop.compute(model, nn.CrossEntropyLoss(), (x, y), [extensions.BatchGrad()], progress=True)
    assert capfd.readouterr() == ("", "")


class Sometimes(nn.Module):
    """A model that uses one of its layers only if the first input is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        out = self.always(x)
        return out + self.sometimes(x) if x[0, 0] > 0 else out


@pytest.mark.parametrize("first", [1.0, -1.0])
def test_a_parameter_that_some_batches_do_not_use(first: float) -> None:
    """Sums over samples stay right; rows for single samples are refused, since their order is not known."""
    model, (x, y) = Sometimes(), (torch.randn(4, 3).double(), torch.randint(2, (4,)))
    x[0, 0], x[2, 0] = first, -first
    data = [(x[:2], y[:2]), (x[2:], y[2:])]
    used = data[0] if first > 0 else data[1]
    exact = extensions.DiagGGNExact()
    found = compute(model, nn.CrossEntropyLoss(), data, exact)[exact]["sometimes.weight"]
    alone = compute(model, nn.CrossEntropyLoss(), [used], exact)[exact]["sometimes.weight"]
    assert_near(found, alone / 2, "half the samples")
    for extension in (extensions.BatchGrad(), extensions.Variance(), extensions.BatchL2Grad()):
        with pytest.raises(PackpropError, match="sometimes") as error:
            compute(model, nn.CrossEntropyLoss(), data, extension)
        assert "for 2 of the first 4 samples" in error.value.why
