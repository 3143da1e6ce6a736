"""Whose rows the loss has, where no position meets another one: seen, known, or asked for; never guessed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from tests.cases.models.wrapping import Apply
from tests.versions import needs_hooks

SMALL, LARGE = (4, 6, 3), (8, 16, 300)  # no two of the axes that may hold the samples are equally long


def flat(x: Tensor, time_first: bool) -> Tensor:
    """``[n, t, d]`` to ``[n t, d]`` or ``[t n, d]``."""
    return (x.transpose(0, 1) if time_first else x).flatten(0, 1)


def deep() -> nn.Module:
    """Two more layers."""
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


def position_wise(width: int, time_first: bool, run: Callable[..., Any]) -> nn.Module:
    """A network that takes each position by itself, within ``run``."""

    def forward(m: Any, x: Tensor) -> Any:
        return run(lambda x: m.head(m.first(flat(x, time_first)).relu()), x)

    return Apply(forward, first=nn.Linear(width, 5), head=deep()).double()


def directly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """No checkpoint."""
    return function(x)


def contexts() -> Any:
    """Keep products, compute all else again, and count both."""

    def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = function is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


PLAIN = pytest.param(directly, id="directly")
CHECKPOINT = pytest.param(partial(checkpoint, use_reentrant=False), id="checkpoint")
SELECTIVE = pytest.param(
    partial(checkpoint, use_reentrant=False, context_fn=contexts), id="selective", marks=needs_hooks
)
REENTRANT = pytest.param(partial(checkpoint, use_reentrant=True), id="reentrant")


def observe(model: nn.Module, shape: tuple[int, ...], time_first: bool, **options: Any) -> None:
    """Gradients of samples, against one term of the loss after the other."""
    torch.manual_seed(0)
    x, y = torch.randn(shape).double(), torch.randn(*shape[:2], 2).double()
    x.requires_grad_(options.pop("differentiable", False))
    packprop.extend(model, **options)
    with packprop.backpack(extensions.BatchGrad()):
        nn.functional.mse_loss(model(x), flat(y, time_first)).backward()
    with packprop.disable():
        apart = (model(x) - flat(y, time_first)).square().mean(1)
        apart = apart.view(shape[1], shape[0]).T if time_first else apart.view(shape[0], shape[1])
        for name, parameter in model.named_parameters():
            rows = [
                torch.autograd.grad(term.mean() / len(x), parameter, retain_graph=True)[0] for term in apart
            ]
            torch.testing.assert_close(parameter.grad_batch, torch.stack(rows), msg=name)


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("run", [PLAIN, CHECKPOINT])
def test_leading_axes_made_into_one(run: Callable[..., Any], shape: tuple[int, ...]) -> None:
    """The order of the rows is known, however large the inputs are."""
    observe(position_wise(shape[2], False, run), shape, False)


RESHAPED = [
    lambda x: torch.reshape(x, (-1, x.shape[-1])),
    lambda x: x.view(x.shape[0] * x.shape[1], -1),
    lambda x: torch.flatten(x, end_dim=1),
]


@pytest.mark.parametrize("reshaped", RESHAPED)
@pytest.mark.parametrize(
    "layer", [nn.Linear(300, 2), nn.Sequential(nn.Linear(300, 4), nn.ReLU(), nn.Linear(4, 2))]
)
def test_other_ways_to_make_axes_into_one(layer: nn.Module, reshaped: Callable[[Tensor], Tensor]) -> None:
    observe(Apply(lambda m, x: m.layer(reshaped(x)), layer=layer).double(), LARGE, False)


@pytest.mark.parametrize("axis", [0, None], ids=["declared", "undeclared"])
def test_an_input_that_is_given_by_its_name(axis: int | None) -> None:
    """A function of which recording knows something need not get its tensor by place."""
    model = Apply(lambda m, x: m.layer(torch.flatten(input=x, end_dim=1)), layer=nn.Linear(300, 2)).double()
    if axis is None:
        with pytest.raises(PackpropError, match="sample_axis=0"):
            observe(model, LARGE, False)
    else:
        observe(model, LARGE, False, sample_axis=axis)


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("run", [PLAIN, CHECKPOINT])
def test_positions_that_come_first(run: Callable[..., Any], shape: tuple[int, ...]) -> None:
    """They look like samples: which is which has to be declared."""
    with pytest.raises(PackpropError, match=r"sample_axis=0"):
        observe(position_wise(shape[2], True, run), shape, True)


@pytest.mark.parametrize("time_first", [False, True], ids=["samples-first", "positions-first"])
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("run", [PLAIN, CHECKPOINT])
def test_what_was_declared_is_seen(run: Callable[..., Any], shape: tuple[int, ...], time_first: bool) -> None:
    observe(position_wise(shape[2], time_first, run), shape, time_first, sample_axis=0)


@pytest.mark.parametrize("time_first", [False, True], ids=["samples-first", "positions-first"])
@pytest.mark.parametrize("run", [SELECTIVE, REENTRANT])
def test_nothing_is_guessed_where_nothing_can_be_seen(run: Callable[..., Any], time_first: bool) -> None:
    """Neither kind of checkpoint lets functions run on copies of the inputs, or keeps what they have shown."""
    model = position_wise(SMALL[2], time_first, run)
    with pytest.raises(PackpropError, match=r"outside of reentrant checkpoints|without context_fn"):
        observe(model, SMALL, time_first, sample_axis=0, differentiable=True)


@pytest.mark.parametrize("run", [PLAIN, CHECKPOINT])
@pytest.mark.parametrize("shape", [(3, 1, 3, 2), (16, 2, 16, 16)], ids=["small", "large"])
@pytest.mark.parametrize("axis", [0, None], ids=["declared", "undeclared"])
def test_as_many_samples_as_rows_of_pixels(axis: int | None, shape: tuple[int, ...], run: Any) -> None:
    """Behind a normalisation of the inputs, rows of pixels are apart as samples are."""
    samples, channels = shape[:2]

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.norm(run(torch.sigmoid, x)).flatten(2).permute(2, 0, 1)
        out: Tensor = m.head(h.flatten(0, 1))
        return out

    def pixels() -> nn.Module:
        torch.manual_seed(0)
        return Apply(forward, norm=nn.GroupNorm(1, channels), head=nn.Linear(channels, 2)).double()

    torch.manual_seed(0)
    x, y = torch.randn(shape).double(), torch.randn(shape[2] * shape[3] * samples, 2).double()
    model, plain = packprop.extend(pixels(), sample_axis=axis), pixels()
    if axis is None and x.numel() > 1000:
        with pytest.raises(PackpropError, match="sample_axis=0"), packprop.backpack(extensions.BatchGrad()):
            nn.functional.mse_loss(model(x), y).backward()
        return
    with packprop.backpack(extensions.BatchGrad()):
        nn.functional.mse_loss(model(x), y).backward()
    terms = (plain(x) - y).square().view(-1, samples, 2).sum((0, 2)) / y.numel()
    rows = [
        torch.autograd.grad(term, plain.get_parameter("norm.weight"), retain_graph=True)[0] for term in terms
    ]
    torch.testing.assert_close(model.get_parameter("norm.weight").grad_batch, torch.stack(rows))


def test_positions_are_not_taken_where_samples_are_mixed() -> None:
    """They are kept apart, but it was not seen that samples come second."""
    torch.manual_seed(0)
    shape, layers = LARGE, {"first": nn.Linear(300, 3), "head": nn.Linear(3, 2)}
    model = Apply(lambda m, x: m.head(m.first(x.sin()) - m.first(x.sin()).amax(0)).flatten(0, 1), **layers)
    x, y = torch.randn(shape).double(), torch.randn(shape[0] * shape[1], 2).double()
    packprop.extend(model.double())
    with pytest.raises(PackpropError, match="sample_axis=1"), packprop.backpack(extensions.BatchGrad()):
        nn.functional.mse_loss(model(x), y).backward()


def test_a_checkpoint_that_counts_what_is_computed() -> None:
    """Nothing else runs under its contexts, so that it finds in the backward pass what it has kept."""
    slopes = []
    for extended in (False, True):
        torch.manual_seed(0)
        model, x = position_wise(SMALL[2], False, SELECTIVE.values[0]), torch.randn(SMALL).double()
        if extended:
            packprop.extend(model, sample_axis=0)
        model(x).square().mean().backward()
        slopes.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*slopes, rtol=0, atol=0)
