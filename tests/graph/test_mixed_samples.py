"""Samples that are mixed are an error, whatever their number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from tests.cases.models.wrapping import Apply
from tests.graph.one_by_one import check, double
from tests.references.mixing import MIXING
from tests.references.running import assert_near, assert_rows_of_terms, right_or_refused
from tests.selection import one_in


@one_in(3)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 9])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("mix", MIXING)
def test_samples_mixed_between_layers(mix: Callable[[Tensor], Tensor], width: int, size: int) -> None:
    """No per-sample quantity exists: an error, never a number."""
    model = packprop.extend(
        double(
            Apply(
                lambda m, x: m.head(mix(torch.tanh(m.first(x)))),
                first=nn.Linear(3, width),
                head=nn.Linear(width, width),
            )
        )
    )
    x, y = torch.randn(size, 3).double(), torch.randn(size, width).double()
    loss = packprop.extend(nn.MSELoss())(model(x), y)
    if _sorts(mix) and size == width == 2:  # few rows may be left whole
        with right_or_refused("sample"):
            assert_rows_of_terms((model(x) - y).square() / y.numel(), loss, model.parameters())
        return
    with pytest.raises(PackpropError) as caught, packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    assert "sample" in str(caught.value)
    assert "first" in str(caught.value)
    assert not any(hasattr(p, "grad_batch") for p in model.parameters())


def _sorts(mix: Callable[[Tensor], Tensor]) -> bool:
    rising = torch.arange(6.0).view(3, 2)
    return torch.equal(mix(rising), rising) and torch.equal(mix(rising.flip(0)), rising)


@one_in(2)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("mix", MIXING)
def test_samples_mixed_before_the_first_parameter(mix: Callable[[Tensor], Tensor], size: int) -> None:
    """Statistics of the inputs are constants: each term of the loss still has its own gradient."""
    model = double(
        Apply(
            lambda m, x: m.head(torch.tanh(m.first(mix(x)))),
            first=nn.Linear(3, 3),
            head=nn.Linear(3, 2),
        )
    )
    check(model, torch.randn(size, 3).double())


@pytest.mark.parametrize("first", [nn.Conv2d(1, 3, 2), nn.Sequential(nn.Flatten(), nn.Linear(16, 3))])
def test_images_of_one_channel_mixed_before_the_first_parameter(first: nn.Module) -> None:
    """The channel is no batch of one."""
    model = Apply(lambda m, x: m.first(x - x.mean(0)).flatten(1), first=first)
    check(double(model), torch.randn(3, 1, 4, 4).double())


@one_in(2)
@pytest.mark.parametrize("size", [2, 3, 4, 200])
def test_features_are_no_samples(size: int) -> None:
    """``[n, f]``: where n samples are mixed, f positions that the model makes of them are not f samples."""
    model = packprop.extend(
        double(
            Apply(
                lambda m, x: m.head(torch.tanh(m.first(x[:, None].expand(-1, 12, 12) * m.scale[0])).roll(1, 0)),
                scale=nn.ParameterList([torch.randn(12, 12)]),
                first=nn.Linear(12, 3),
                head=nn.Linear(3, 2),
            )
        )
    )
    x, y = torch.randn(size, 12).double(), torch.randn(size * 12, 2).double()
    loss = packprop.extend(nn.MSELoss())(model(x).flatten(0, 1), y)
    terms = (model(x) - y.unflatten(0, (size, 12))).square() / y.numel()
    with right_or_refused("mixed"):
        assert_rows_of_terms(terms, loss, model.parameters())


def test_one_number_a_sample_mixed_before_the_first_parameter() -> None:
    """``[n, 1]``: a feature is no batch of one either."""
    model = Apply(lambda m, x: m.line((x - x.mean(0)) / x.std(0)), line=nn.Linear(1, 1))
    check(double(model), torch.randn(5, 1).double())


def test_one_sample_alone_is_never_mixed() -> None:
    model = Apply(
        lambda m, x: m.head(torch.tanh(m.first(x)).cumsum(0)),
        first=nn.Linear(3, 3),
        head=nn.Linear(3, 2),
    )
    check(double(model), torch.randn(1, 3).double())


def test_an_input_without_a_batch_axis_is_refused_or_one_sample() -> None:
    """``[d] -> [d]``: features are not samples."""
    model = packprop.extend(double(nn.Linear(3, 3)))
    x, y = torch.randn(3).double(), torch.randn(3).double()
    loss = packprop.extend(nn.MSELoss())(model(x), y)
    with right_or_refused("sample"):
        with packprop.backpack(extensions.BatchGrad()):
            loss.backward()
        assert_near(model.weight.grad_batch, model.weight.grad[None], "one sample")


@one_in(3)
@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("form", ["major", "minor", "time-first"])
@pytest.mark.parametrize("mix", MIXING)
def test_an_axis_of_one_entry_does_not_make_a_batch_one_sample(
    mix: Callable[[Tensor], Tensor], form: str, size: int
) -> None:
    """``[n, 1, d]`` in, ``[n, c, t]`` out: where n samples are mixed, they are not one; t may be them."""
    axes = {"major": (0, 2, 1), "minor": (2, 0, 1), "time-first": (2, 0, 1)}[form]

    def forward(m: Apply, x: Tensor) -> Tensor:
        out = mix(torch.tanh(m.first(x[:, 0]))).view(len(x), 3, 2).permute(axes)
        return out if form == "time-first" else out.flatten(0, 1)

    model = packprop.extend(double(Apply(forward, first=nn.Linear(4, 6))))
    out = model(torch.randn(size, 1, 4).double())
    target = torch.randn_like(out.detach())
    loss = packprop.extend(nn.MSELoss())(out, target)
    terms = ((out - target).square() / target.numel()).reshape(size if form == "major" else 2, -1)
    with right_or_refused("sample"):
        assert_rows_of_terms(terms, loss, model.parameters())


@pytest.mark.parametrize("shape", [(1, 5, 3), (5, 1, 3)])
def test_a_batch_of_one_on_either_axis(shape: tuple[int, int, int]) -> None:
    """Time comes second or first, and is mixed."""
    time = 1 if shape[0] == 1 else 0
    layers = {"first": nn.Linear(3, 3), "head": nn.Linear(3, 2)}
    check(
        double(Apply(lambda m, x: m.head(torch.tanh(m.first(x)).cumsum(time).sum(time)), **layers)),
        torch.randn(shape).double(),
    )
