"""Factors behind the loss function: packprop puts batches together if they are the same, and else refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import PackpropError, operators
from packprop.extensions import EKFAC, BatchL2Grad, DiagGGNExact, DiagHessian, Variance
from tests.references.running import assert_near
from tests.selection import one_in

Loss = Callable[[Any, Tensor], Tensor]


def looped(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(f[None], y[None]) for f, y in zip(outputs, targets, strict=True)]).sum()


def left_out(f: Tensor, y: Tensor) -> Tensor:
    """A term that not every batch has."""
    loss = F.mse_loss(f, F.one_hot(y, 3).to(f), reduction="sum")
    kept = (f[:, :1].detach() > 0.3).to(f)
    return loss + F.smooth_l1_loss(f * kept, torch.zeros_like(f), reduction="sum") if kept.any() else loss


def by_sample(f: Tensor, y: Tensor) -> Tensor:
    """An option that belongs to the sample."""
    terms = [
        F.huber_loss(f[n : n + 1], torch.zeros_like(f[:1]), delta=0.1 + int(y[n]), reduction="sum")
        for n in range(len(f))
    ]
    return torch.stack(terms).sum()


SAME: dict[str, Loss] = {
    "left out": left_out,
    "half": lambda f, y: 0.5 * F.cross_entropy(f, y),
    "third of a sum": lambda f, y: F.cross_entropy(f, y, reduction="sum") / 3,
    "two means": lambda f, y: F.cross_entropy(f, y) + 2 * F.mse_loss(f, F.one_hot(y, 3).to(f)),
    "one by one": lambda f, y: looped(f, y) / len(y),
    "ignored": lambda f, y: 3 * F.cross_entropy(f, y, ignore_index=1),
    "smoothed": lambda f, y: 0.5 * F.cross_entropy(f, y, label_smoothing=0.1),
    "weighted": lambda f, y: 3 * F.cross_entropy(f, y, weight=torch.tensor([0.1, 0.7, 2.0]).to(f)),
}
OTHER: dict[str, Loss] = {
    "sum over size": lambda f, y: F.cross_entropy(f, y, reduction="sum") / len(y),
    "mean times size": lambda f, y: F.cross_entropy(f, y) * len(y),
    "by data": lambda f, y: F.cross_entropy(f, y) * f.detach().norm(),
    "sum of means": looped,
}
OPTIONS: dict[str, Loss] = {
    "weights of the batch": lambda f, y: F.cross_entropy(f, y, weight=1 / (1 + y.bincount(minlength=3)).to(f)),
    "weights of positives": lambda f, y: F.binary_cross_entropy_with_logits(
        f, F.one_hot(y, 3).to(f), pos_weight=F.one_hot(y, 3).sum(0).to(f)
    ),
    "smoothed by data": lambda f, y: F.cross_entropy(f, y, label_smoothing=1 / (2 + float(f.detach().norm()))),
}
SPLITS = {"equal": (3, 3, 3), "unequal": (4, 3, 2), "one by one": (1,) * 9}


class Own(nn.Module):
    """A model that computes its loss, and is interrupted in one of its calls."""

    def __init__(self, left: int = 100) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3).double()
        self.calls = [left]

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.calls[0] -= 1
        if not self.calls[0]:
            raise KeyboardInterrupt
        return {"loss": F.cross_entropy(self.layer(x), labels, reduction="sum") / len(x)}


def case() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, torch.randn(9, 4).double(), torch.arange(9) % 3


def split(x: Tensor, y: Tensor, sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


@one_in(3)
@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("name", SAME)
def test_any_split_gives_the_same_values(name: str, sizes: tuple[int, ...]) -> None:
    model, x, y = case()
    asked = [BatchL2Grad(), DiagGGNExact(), Variance()]
    whole = packprop.compute(model, SAME[name], [(x, y)], asked)
    parts = packprop.compute(model, SAME[name], split(x, y, sizes), asked)
    for extension in asked:
        for parameter, value in whole[extension.savefield].items():
            assert_near(parts[extension.savefield][parameter], value, f"{extension.name} of {parameter}")


@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("name", SAME)
def test_rounding_is_no_other_factor(name: str, sizes: tuple[int, ...]) -> None:
    model, x, y = case()
    found = packprop.compute(
        model.bfloat16(), SAME[name], split(x.bfloat16(), y, sizes), BatchL2Grad(), progress=False
    )
    assert found["batch_l2"]


@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("name", OTHER)
def test_other_factors_are_refused(name: str, sizes: tuple[int, ...]) -> None:
    model, x, y = case()
    with pytest.raises(PackpropError, match="multiplies the loss"):
        packprop.compute(model, OTHER[name], split(x, y, sizes), BatchL2Grad())
    assert not any(hasattr(parameter, "batch_l2") for parameter in model.parameters())


@pytest.mark.parametrize("sizes", [(3, 3, 3), (4, 3, 2)], ids=str)
def test_options_of_samples_are_no_options(sizes: tuple[int, ...]) -> None:
    model, x, y = case()
    whole = packprop.compute(model, by_sample, [(x, y)], BatchL2Grad())["batch_l2"]
    parts = packprop.compute(model, by_sample, split(x, y, sizes), BatchL2Grad())["batch_l2"]
    for name, value in whole.items():
        assert_near(parts[name], value, name)


@pytest.mark.parametrize("sizes", [(4, 3, 2), (1,) * 9], ids=["unequal", "one by one"])
@pytest.mark.parametrize("name", OPTIONS)
def test_other_options_are_refused(name: str, sizes: tuple[int, ...]) -> None:
    model, x, y = case()
    with pytest.raises(PackpropError, match="an option of a loss function"):
        packprop.compute(model, OPTIONS[name], split(x, y, sizes), BatchL2Grad())


def images(f: Tensor, y: Tensor, positives: Tensor) -> Tensor:
    given, hot = (each[:, :, None, None].expand(-1, 3, 2, 2) for each in (f, F.one_hot(y, 3).to(f)))
    return F.binary_cross_entropy_with_logits(given, hot, pos_weight=positives)


@pytest.mark.parametrize("shape", [(1, 3), (3, 1, 1), (1, 3, 1, 1)], ids=str)
def test_weights_of_classes_with_several_axes(shape: tuple[int, ...]) -> None:
    model, x, y = case()

    def loss(f: Tensor, y: Tensor) -> Tensor:
        hot = F.one_hot(y, 3).to(f)
        positives = (hot * f.detach()).sum(0).view(shape)
        if shape != (1, 3):
            return images(f, y, positives)
        return F.binary_cross_entropy_with_logits(f, hot, pos_weight=positives)

    with pytest.raises(PackpropError, match="an option of a loss function"):
        packprop.compute(model, loss, split(x, y, (4, 3, 2)), BatchL2Grad(), progress=False)


def test_weights_of_samples_may_differ() -> None:
    model, x, y = case()

    def loss(f: Tensor, y: Tensor) -> Tensor:
        return images(f, y, F.one_hot(y, 3).to(f)[:, :, None, None] + 1)

    for sizes in SPLITS.values():
        assert packprop.compute(model, loss, split(x, y, sizes), BatchL2Grad(), progress=False)["batch_l2"]


@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("matrix", ["ggn", "hessian"])
def test_products_refuse_them(matrix: Literal["ggn", "hessian"], sizes: tuple[int, ...]) -> None:
    model, x, y = case()
    data = split(x, y, sizes)
    with pytest.raises(PackpropError, match="multiplies the loss"):
        operators.trace(operators.of_data(model, OTHER["sum over size"], data, matrix, progress=False))


def test_squares_of_losses_are_refused() -> None:
    """A single pass refuses the rows of one; a sum of Hessians would need the factor of the whole."""
    model, x, y = case()
    data = split(x, y, (4, 3, 2))

    def square(f: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(f, y) ** 2

    for asked in (BatchL2Grad(), DiagHessian()):
        with pytest.raises(PackpropError, match=r"multiplies the loss|mixes the samples"):
            packprop.compute(model, square, data, asked)


def test_a_model_that_computes_its_loss() -> None:
    _, x, y = case()
    batches = [{"x": x[:5], "labels": y[:5]}, {"x": x[5:], "labels": y[5:]}]
    with pytest.raises(PackpropError, match="multiplies the loss"):
        packprop.compute(Own(), None, batches, BatchL2Grad())


@pytest.mark.parametrize("name", OTHER)
def test_one_batch_may_have_any_factor(name: str) -> None:
    """The values of a single batch are those of its loss, also if packprop reads it twice."""
    model, x, y = case()
    found = packprop.compute(model, OTHER[name], [(x, y)], [BatchL2Grad(), EKFAC(mc_samples=1)])
    with packprop.record(), packprop.backpack(BatchL2Grad()):
        OTHER[name](model(x), y).backward()
    for parameter, leaf in model.named_parameters():
        assert_near(found["batch_l2"][parameter], leaf.batch_l2, parameter)


def test_the_loss_draws_as_before() -> None:
    """The loss of one row more leaves the random state of the process as it was."""
    model, x, y = case()

    def loss(f: Tensor, y: Tensor) -> Tensor:
        return 2 * F.cross_entropy(F.dropout(f, 0.5), y)

    torch.manual_seed(1)
    first = packprop.compute(model, loss, split(x, y, (5, 4)), BatchL2Grad())
    after = torch.rand(3)
    torch.manual_seed(1)
    for part in x.split((5, 4)):
        F.dropout(model(part), 0.5)
    assert torch.equal(after, torch.rand(3))
    assert first["batch_l2"]


def test_a_resumed_run_compares_with_the_batches_before(tmp_path: Path) -> None:
    _, x, y = case()
    batches = [{"x": a, "labels": b} for a, b in split(x, y, (4, 4, 1))]
    with pytest.raises(KeyboardInterrupt):
        packprop.compute(Own(3), None, batches, BatchL2Grad(), checkpoint=tmp_path)
    with pytest.raises(PackpropError, match=r"multiplies the loss by 1, and by 0\.25"):
        packprop.compute(Own(), None, batches, BatchL2Grad(), checkpoint=tmp_path)
