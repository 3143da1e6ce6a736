"""Outputs of a model that come from one node: the pass begins at those that it reaches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import PackpropError, extensions
from tests.references.refusals import check
from tests.references.running import assert_near, assert_rows_of_terms

SAMPLES, WIDTH, EACH = 5, 4, 3
Cut = Callable[[Tensor], Any]

CUTS: dict[str, Cut] = {
    "chunk": lambda h: h.chunk(2, -1),
    "split": lambda h: h.split([EACH, EACH], 1),
    "unbind": lambda h: h.view(len(h), EACH, 2).unbind(-1),
}
each_cut = pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)


class Cutting(nn.Module):
    """Returns the parts of what its layer made."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * EACH)
        self.cut = cut

    def forward(self, x: Tensor) -> Any:
        return self.cut(self.linear(x))


class Beside(nn.Module):
    """A loss that also reads a tensor which is none of its arguments."""

    def __init__(self, of_batch: bool) -> None:
        super().__init__()
        self.of_batch = of_batch
        self.other = torch.empty(0)

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        other = self.other.mean(0) if self.of_batch else self.other
        return (out - y).square().sum() + other.square().sum()


def ready(cut: Cut) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    return packprop.extend(Cutting(cut).double()), torch.randn(SAMPLES, WIDTH).double()


def square(out: Tensor) -> Tensor:
    return out.square().sum()


def against_zero(out: Tensor) -> Tensor:
    return F.mse_loss(out, torch.zeros_like(out), reduction="sum")


@each_cut
@pytest.mark.parametrize("mixed", [0, 1])
@pytest.mark.parametrize("loss", [square, against_zero])
def test_samples_that_meet_in_one_of_them_are_refused(cut: Cut, mixed: int, loss: Any) -> None:
    model, x = ready(cut)
    outputs = model(x)
    with packprop.backpack(extensions.BatchGrad()), pytest.raises(PackpropError) as caught:
        (square(outputs[mixed].mean(0)) + loss(outputs[1 - mixed])).backward()
    check(caught.value, "mixes the samples")


@each_cut
@pytest.mark.parametrize("first", [square, against_zero])
@pytest.mark.parametrize("taken", [(0,), (1,), (0, 1)])
def test_rows_of_those_that_the_loss_takes(cut: Cut, first: Any, taken: tuple[int, ...]) -> None:
    model, x = ready(cut)
    for _ in range(4):  # later passes keep the walk
        model.zero_grad()
        outputs = model(x)
        terms = torch.stack([outputs[place].square() for place in taken], 1)
        loss = first(outputs[taken[0]]) + sum(square(outputs[place]) for place in taken[1:])
        assert_rows_of_terms(terms, loss, model.parameters())


@pytest.mark.parametrize("place", [0, 1])
def test_batches_of_different_sizes(place: int) -> None:
    """The samples are those of the part that the loss takes."""
    model, x = ready(lambda h: h.split([3, 2], 0))
    out = model(x)[place]
    assert_rows_of_terms(out.square(), square(out), model.parameters())


@each_cut
@pytest.mark.parametrize("place", [0, 1])
def test_the_jacobian_is_that_of_the_output_that_is_used(cut: Cut, place: int) -> None:
    model, x = ready(cut)
    out = model(x)[place]
    weight = model.linear.weight
    expected = [torch.autograd.grad(each, weight, retain_graph=True)[0] for each in out.flatten()]
    with packprop.backpack(extensions.BatchJacobian()):
        square(out).backward()
    assert_near(weight.jac_batch.flatten(0, 1), torch.stack(expected), "Jacobian")


@each_cut
@pytest.mark.parametrize("place", [0, 1])
def test_a_loss_that_reads_another_one(cut: Cut, place: int) -> None:
    model, x = ready(cut)
    y = torch.zeros(SAMPLES, EACH).double()
    apart, joint = (packprop.extend(Beside(of_batch)) for of_batch in (False, True))
    outputs = model(x)
    apart.other = outputs[1 - place]
    terms = torch.stack([each.square() for each in outputs], 1)
    assert_rows_of_terms(terms, apart(outputs[place], y), model.parameters())
    outputs = model(x)
    joint.other = outputs[1 - place]
    with packprop.backpack(extensions.BatchGrad()), pytest.raises(PackpropError) as caught:
        joint(outputs[place], y).backward()
    check(caught.value, "mixes the samples")


def test_parts_that_the_model_returns_in_a_later_pass() -> None:
    """A kept walk serves no pass whose model returns other parts of the same node."""
    model, x = ready(CUTS["chunk"])
    jacobians = {}
    for returned in ([0, 1], [0], [1], [0, 1], [0]):
        model.cut = lambda h, returned=returned: [h.chunk(2, -1)[place] for place in returned]
        for _ in range(4):
            with packprop.backpack(extensions.BatchJacobian()):
                against_zero(model(x)[0]).backward()
        place = returned[0]
        found = model.linear.weight.jac_batch.clone()
        assert_near(found, jacobians.setdefault(place, found), "Jacobian")
        assert found[:, :, EACH * place : EACH * (place + 1)].any()
