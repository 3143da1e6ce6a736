"""Losses and data that are refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import BadInput, PackpropError, extensions
from packprop.applications.dataset.state import MergedResults
from tests.dataset.small import compute, small


def none_then_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none").mean()


def two_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets) + F.multi_margin_loss(outputs, targets)


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
def test_an_older_flag_is_the_reduction_that_the_node_tells() -> None:
    def summed(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, size_average=False)

    model, data = small()
    asked = extensions.BatchGrad()
    found = compute(model, summed, data, asked, batch_size=3)[asked]
    expected = compute(model, nn.CrossEntropyLoss(reduction="sum"), data, asked, batch_size=3)[asked]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("loss", [none_then_mean, two_losses])
def test_losses_whose_divisor_is_not_known(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, data = small()
    with pytest.raises(PackpropError, match="what it is divided by is not known"):
        compute(model, loss, data, extensions.BatchGrad(), batch_size=3)


def test_reasons_and_remedies_are_those_of_the_call() -> None:
    model, data = small()
    with pytest.raises(BadInput, match=re.escape("batch_size=int(batch_size)")):
        compute(model, nn.CrossEntropyLoss(), data, extensions.BatchGrad(), batch_size=np.int64(2))
    with pytest.raises(PackpropError, match="no parameter that requires gradients") as caught:
        compute(model.requires_grad_(False), nn.CrossEntropyLoss(), data, extensions.BatchGrad())
    assert "requires_grad=True" in caught.value.instead


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("function", [F.mse_loss, F.huber_loss, F.l1_loss, F.poisson_nll_loss])
@pytest.mark.parametrize("shapes", [((-1, 1), (-1,)), ((-1,), (-1, 1))], ids=["rows", "columns"])
def test_targets_that_broadcast_over_the_samples(shapes: Any, function: Any, reduction: str) -> None:
    """Each sample meets the targets of its batch, which are others in another batch."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return function(outputs.view(shapes[0]), targets.view(shapes[1]), reduction=reduction)

    with pytest.raises(PackpropError, match="divided by is not known"):
        compute(nn.Linear(3, 1), loss, (torch.randn(6, 3), torch.rand(6)), extensions.BatchGrad(), batch_size=3)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("function", [F.mse_loss, F.huber_loss])
def test_several_targets_of_a_sample(function: Any) -> None:
    """Those of one sample, ``[n, 1]`` against ``[n, 3]``, are in its own terms."""
    model, data = nn.Linear(3, 1).double(), (torch.randn(5, 3).double(), torch.rand(5, 3).double())
    asked = extensions.BatchGrad()
    found = compute(model, function, data, asked, batch_size=3)[asked]
    packprop.extend(model)
    with packprop.backpack(extensions.BatchGrad()), packprop.record():
        function(model(data[0]), data[1]).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad_batch)


def test_a_loss_that_changes_its_reduction() -> None:
    model, (x, y) = small()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        reduction = "mean" if len(outputs) == 3 else "sum"
        return F.cross_entropy(outputs, targets, reduction=reduction)

    with pytest.raises(PackpropError, match="reduces by mean, then by sum"):
        compute(model, loss, [(x[:3], y[:3]), (x[3:], y[3:])], extensions.BatchGrad())


def broken() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.zeros(2, 3).double(), torch.zeros(2, dtype=torch.long)
    raise OSError("the disk is gone")


ZEROS, CLASSES = torch.zeros(2, 3).double(), torch.zeros(2, dtype=torch.long)
BAD_DATA: list[tuple[Any, str, str]] = [
    ([], "data", "it held no batch"),
    (3, "data int", "neither a data set nor can it be iterated over"),
    ((ZEROS, torch.zeros(3)), "[2, 3] float64 and [3] float32", "not a pair whose first axes"),
    ((ZEROS, CLASSES, CLASSES), "tensors [2, 3] float64", "not a pair whose first axes"),
    ("text", "batch 1 of the data, str", "not a pair (inputs, targets)"),
    ([{"x": ZEROS}], "batch 1 of the data, dict of tensors [2, 3]", "not a pair (inputs, targets)"),
    ([(ZEROS, CLASSES, 1)], "batch 1 of the data, tuple", "not a pair (inputs, targets)"),
    ([(1, CLASSES)], "batch 1 of the data", "with tensors as inputs"),
    ([(ZEROS, CLASSES), None], "batch 2 of the data, NoneType", "not a pair (inputs, targets)"),
    ([(ZEROS[:, :2], CLASSES)], "batch 1 of the data, inputs [2, 2] float64", "mat1"),
    (
        [(ZEROS, CLASSES), (ZEROS, CLASSES + 5)],
        "batch 2 of the data, inputs [2, 3] float64, targets [2] int64",
        "IndexError: Target 5 is out of bounds",
    ),
    (broken(), "the data, after 1 batches", "OSError: the disk is gone (" + __file__),
]


@pytest.mark.parametrize(("data", "where", "why"), BAD_DATA)
def test_bad_data_are_described(data: Any, where: str, why: str) -> None:
    with pytest.raises(BadInput) as error:
        compute(small()[0], nn.CrossEntropyLoss(), data, extensions.BatchGrad())
    assert where in error.value.where
    assert why in error.value.why
    assert error.value.instead


def test_inference_mode_is_refused_and_no_grad_is_not() -> None:
    model, loss, given = nn.Linear(2, 1), nn.MSELoss(), [extensions.Variance()]
    data = torch.rand(3, 2), torch.rand(3, 1)
    with torch.inference_mode(), pytest.raises(BadInput, match=r"torch.inference_mode\(\)"):
        packprop.compute(model, loss, data, given, progress=False)
    with torch.no_grad():
        assert packprop.compute(model, loss, data, given, progress=False).samples == 3


def test_batch_size_for_data_that_come_in_batches() -> None:
    model, (x, y) = small()
    with pytest.raises(BadInput, match="these data come in batches already"):
        compute(model, nn.CrossEntropyLoss(), [(x, y)], extensions.BatchGrad(), batch_size=3)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ([extensions.BatchDotGrad()], "depends on which samples are in one batch"),
        ([extensions.BatchGrad(subsampling=[0])], "depends on which samples are in one batch"),
        ([extensions.BatchGrad], "it is a class, not an instance"),
        (
            [extensions.DiagGGNMC(), extensions.DiagGGNMC(mc_samples=3)],
            "another extension is also saved as 'diag_ggn_mc'",
        ),
    ],
)
def test_extensions_that_are_refused(asked: list[Any], why: str) -> None:
    model, data = small()
    with pytest.raises(BadInput) as error:
        compute(model, nn.CrossEntropyLoss(), data, *asked)
    assert why in error.value.why


def test_errors_between_batches_are_not_errors_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, ranks: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(MergedResults, "end_first_reading", broken)
    model, data = small()
    with pytest.raises(OSError, match=r"^no space left$"):
        compute(model, nn.CrossEntropyLoss(), data, extensions.EKFAC(fisher="exact"))


def test_terms_at_positions_that_are_reduced_by_hand(tmp_path: Path) -> None:
    """A store that keeps losses of samples meets them before their divisor is asked for."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Unflatten(1, (2, 4)))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none").mean()

    data, asked = (torch.randn(6, 3), torch.randint(2, (6, 4))), extensions.BatchGrad()
    with pytest.raises(PackpropError, match="what it is divided by is not known"):
        compute(model, loss, data, asked, batch_size=3, store=tmp_path / "store", losses=True)


class Head(nn.Linear):
    """A loss with a weight of its own."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(outputs), targets)


@pytest.mark.parametrize("kept", [False, True], ids=["merged", "stored"])
def test_parameters_of_one_name_are_refused(kept: bool, tmp_path: Path) -> None:
    """Those of model and loss; those that neither holds; those of two batches."""
    scales = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    heads = [Head(3, 3, bias=False) for _ in range(2)]
    losses = [
        heads[0],
        lambda f, y: F.cross_entropy(f * scales[0] * scales[1], y),
        lambda f, y: F.cross_entropy(f * scales[len(f) % 2], y),
        lambda f, y: heads[len(f) % 2](f, y),
    ]
    data = torch.randn(5, 3), torch.randint(3, (5,))
    asked, model = extensions.BatchGrad(), nn.Linear(3, 3)
    for number, loss in enumerate(losses):
        store = {"store": tmp_path / str(number)} if kept else {}
        with pytest.raises(PackpropError, match="of which there are several"):
            compute(model, loss, data, asked, batch_size=3, **store)
    with pytest.raises(PackpropError, match="of which there are several"):
        packprop.influence(data, model, heads[0], data)
    named = nn.ModuleDict({"head": heads[0]})
    named.forward = lambda f, y: heads[0](f, y)
    assert compute(model, named, data, asked, batch_size=3)[asked].keys() == {"weight", "bias", "head.weight"}
