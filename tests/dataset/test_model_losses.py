"""Batches in one dictionary, with the labels inside, and losses that the model computes itself."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import packprop
from packprop import BadInput, extensions
from tests.dataset.small import EXACT, compute, small
from tests.references.running import assert_all_near
from tests.selection import one_in


class Output(OrderedDict[str, Any]):
    """A stand-in for a Hugging Face ``ModelOutput``: a dictionary whose entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


class Encoding(UserDict[str, Any]):
    """A stand-in for a ``BatchEncoding``: a mapping that is no ``dict``."""


def as_object(loss: Tensor | None, logits: Tensor) -> Any:
    return SimpleNamespace(loss=loss, logits=logits)


def as_output(loss: Tensor | None, logits: Tensor) -> Any:
    entries = {"loss": loss, "logits": logits}
    return Output((name, value) for name, value in entries.items() if value is not None)


def as_tuple(loss: Tensor | None, logits: Tensor) -> Any:
    return (logits,) if loss is None else (loss, logits)


def as_encoding(loss: Tensor | None, logits: Tensor) -> Any:
    return Encoding(as_output(loss, logits))


def alone(loss: Tensor | None, logits: Tensor) -> Any:
    return logits if loss is None else loss


RETURNED: list[Callable[[Tensor | None, Tensor], Any]] = [as_object, as_output, as_tuple, as_encoding, alone]


class Classifier(nn.Module):
    """A model in the style of Hugging Face: it computes the loss where it is given labels."""

    def __init__(self, body: nn.Module, returned: Callable[[Tensor | None, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.returned = body, returned

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.body(features)
        return self.returned(None if labels is None else F.cross_entropy(logits, labels), logits)


class Rows(Dataset[dict[str, Tensor]]):
    """A data set whose samples are dictionaries."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"features": self.x[index], "labels": self.y[index]}


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dictionaries": lambda x, y: [{"features": x[i : i + 3], "labels": y[i : i + 3]} for i in (0, 3, 6)],
    "mappings": lambda x, y: [Encoding({"features": x[i : i + 3], "labels": y[i : i + 3]}) for i in (0, 3, 6)],
    "data loader": lambda x, y: DataLoader(Rows(x, y), batch_size=3),
    "data set": Rows,
}


def expected_of(body: nn.Module, x: Tensor, y: Tensor) -> Any:
    found = compute(body, nn.CrossEntropyLoss(), [(x, y)], *(make() for make in EXACT))
    return {savefield: {f"body.{name}": v for name, v in found[savefield].items()} for savefield in found}


@one_in(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("returned", RETURNED)
def test_losses_of_the_model(form: str, returned: Callable[[Tensor | None, Tensor], Any]) -> None:
    """The model gets the whole batch, and its own loss is the one that quantities are of."""
    body, (x, y) = small()
    found = compute(Classifier(body, returned), None, FORMS[form](x, y), *(make() for make in EXACT))
    for savefield, values in expected_of(body, x, y).items():
        assert_all_near(found[savefield], values, savefield)


@pytest.mark.parametrize("form", FORMS)
def test_labels_in_the_batch_are_the_targets_of_a_given_loss(form: str) -> None:
    """As in loops that take the labels out: the model does not see them."""
    body, (x, y) = small()
    model = Classifier(body, as_output)

    def loss(output: Any, labels: Tensor) -> Tensor:
        assert "loss" not in output
        return F.cross_entropy(output.logits, labels)

    found = compute(model, loss, FORMS[form](x, y), *(make() for make in EXACT))
    for savefield, values in expected_of(body, x, y).items():
        assert_all_near(found[savefield], values, savefield)


@pytest.mark.parametrize("batched", [True, False])
def test_positional_arguments(batched: bool) -> None:
    """Without a loss a pair is two arguments of the model, not inputs and targets."""
    body, (x, y) = small()
    data = [(x[:3], y[:3]), [x[3:], y[3:]]] if batched else TensorDataset(x, y)
    found = compute(Classifier(body, as_tuple), None, data, *(make() for make in EXACT))
    for savefield, values in expected_of(body, x, y).items():
        assert_all_near(found[savefield], values, savefield)


def test_a_budget_and_a_plan() -> None:
    """The batch is given to the model in a plan as it is in the pass."""
    body, (x, y) = small()
    model, batch = Classifier(body, as_output), Encoding({"features": x, "labels": y})
    asked = extensions.BatchGrad()
    planned = packprop.plan(model, None, batch, [asked])
    same = packprop.plan(body, nn.CrossEntropyLoss(), (x, y), [asked])
    assert planned.results == same.results
    found = compute(model, None, [batch], asked, memory="10MiB")
    assert_all_near(found["grad_batch"], expected_of(body, x, y)["grad_batch"], "grad_batch")
    with_loss = packprop.plan(model, lambda output, y: F.cross_entropy(output.logits, y), batch, [asked])
    assert with_loss.results == same.results


def test_profiles_and_coverage() -> None:
    """Reports take the same batches: a profile its loss, coverage the loss that the model returns."""
    body, (x, y) = small()
    model, batch = Classifier(body, as_output), Encoding({"features": x, "labels": y})
    found = packprop.profile(model, None, [batch], progress=False)
    same = packprop.profile(body, nn.CrossEntropyLoss(), [(x, y)], progress=False)
    assert found.total.gradient_norm == pytest.approx(same.total.gradient_norm, rel=1e-10)
    assert found.settings["loss"] == "the model's own loss"
    covered, expected = packprop.coverage(model, batch), packprop.coverage(body, (x, y))
    assert covered.samples == expected.samples
    assert [use.function for use in covered.parameters["body.0.weight"].uses] == ["linear"]


class Two(nn.Module):
    """A model of two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.first(a) + self.second(b)
        return out


def test_a_data_loader_makes_lists_of_tuples() -> None:
    """Every entry of the library calls the model on them as on tuples."""
    model, (x, y) = Two(), small()[1]
    data = [((x[i], x[i]), y[i]) for i in range(len(x))]
    loader = DataLoader(data, batch_size=len(x))  # type: ignore[arg-type]  # a list is a map-style data set
    (batch,) = loader
    assert isinstance(batch[0], list)
    asked, loss = extensions.BatchGrad(), nn.CrossEntropyLoss()
    expected = compute(model, loss, [((x, x), y)], asked)["grad_batch"]
    assert_all_near(compute(model, loss, loader, asked)["grad_batch"], expected, "grad_batch")
    assert packprop.coverage(model, batch).samples == len(x)
    assert packprop.plan(model, loss, batch, [asked]).samples == len(x)


@pytest.mark.parametrize("returned", RETURNED)
def test_a_model_that_returns_no_loss(returned: Callable[[Tensor | None, Tensor], Any]) -> None:
    body, (x, _) = small()
    with pytest.raises(BadInput, match="Classifier") as error:
        compute(Classifier(body, returned), None, [{"features": x}], extensions.BatchGrad())
    assert "no loss" in error.value.why
    assert "labels" in error.value.instead


@pytest.mark.parametrize("data", [{"features": torch.zeros(2, 3)}, Encoding(features=torch.ones(2, 3))])
def test_one_batch_in_place_of_data(data: Any) -> None:
    """A mapping would be iterated over key by key."""
    with pytest.raises(BadInput, match="one batch") as error:
        compute(Classifier(small()[0], as_output), None, data, extensions.BatchGrad())
    assert "list" in error.value.instead
