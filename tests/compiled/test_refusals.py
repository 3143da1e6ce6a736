"""What compiled steps refuse, and what they leave to ordinary passes, with the reason."""

from __future__ import annotations

import copy
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import extensions
from packprop.applications.compiled import replayer
from packprop.errors import BadInput, PackpropError, PackpropWarning
from tests.compiled.steps import batch, check_call, compiled, network, quietly, replays, settle
from tests.distributed.processes import in_processes, needs_groups
from tests.selection import one_in, thorough

LOSS = nn.CrossEntropyLoss()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((nn.Linear, LOSS), "class Linear"),
        ((F.relu, LOSS), "model, function"),
        ((network(), 3), "loss, int"),
        ((network(), nn.CrossEntropyLoss), "the class CrossEntropyLoss"),
        ((network(), LOSS, extensions.BatchGrad), "it is a class"),
        ((network(), LOSS, extensions.HMP()), "hold the graph"),
    ],
)
def test_bad_arguments(given: tuple[Any, ...], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        packprop.compile(*given)


def test_bad_options() -> None:
    with pytest.raises(BadInput, match="extension_hook"):
        packprop.compile(network(), LOSS, extension_hook=3)
    with pytest.raises(BadInput):
        packprop.compile(network(), LOSS, memory="much")


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_call_without_gradients(without: Callable[[], Any]) -> None:
    step = compiled(network())
    settle(step)
    with without(), pytest.raises(BadInput, match="no_grad"):
        step(*batch())


def test_a_batch_on_another_device() -> None:
    step = compiled(network(), extensions.BatchGrad())
    settle(step)
    x, y = batch()
    with pytest.raises(BadInput, match="a batch on meta"):
        step(x.to("meta"), y.to("meta"))
    quietly(step, x, y)


class Branching(nn.Module):
    """A model that decides by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        if out.sum() > 1e6:  # here
            out = 2 * out
        return out


def test_control_flow_by_values_is_named() -> None:
    model = Branching()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    step = compiled(model, extensions.BatchGrad())
    step(*batch())
    state = torch.get_rng_state()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    given = batch()
    with pytest.raises(PackpropError, match=r"if out\.sum") as raised:
        step(*given)
    assert "test_refusals.py" in raised.value.where
    assert "backpack" in raised.value.instead
    after = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert after == before
    assert not torch.equal(torch.get_rng_state(), state)  # the batch was drawn
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert len(gradients) == 4


class Made(nn.Module):
    """Computes something of its input."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.as_tensor(self.make(x.detach()), dtype=x.dtype)


READS: dict[str, Callable[[Tensor], Any]] = {
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x[0]),
    "dlpack": lambda x: torch.from_dlpack(x),
    "list of tensors": lambda x: torch.tensor([each.sum() for each in x.T]),
    "new_tensor": lambda x: x.new_tensor([x[0, 0], 1, 1]),
    "old constructor": lambda x: torch.Tensor([x[0, 0]]),
    "tensor_split": lambda x: torch.tensor_split(x, (x[:1, 0] > 9).long() + 1)[0][:1],
    "apply_": lambda x: x.clone().apply_(lambda value: value + 1),
    "random number": lambda x: torch.rand(3).tolist(),
    "running mean": lambda x: torch.zeros(3).double().add_(x[0]).tolist(),
}


@one_in(3)
@pytest.mark.parametrize("name", READS)
def test_reads_that_are_no_operations_are_named(name: str) -> None:
    step = compiled(nn.Sequential(network(), Made(READS[name])))
    step(*batch())
    with pytest.raises(PackpropError, match="asks for a value") as raised:
        step(*batch())
    assert "test_refusals.py" in raised.value.where


def test_what_is_read_off_numbers_alone_is_traced() -> None:
    step = compiled(nn.Sequential(network(), Made(lambda x: (torch.arange(3) + len(x)).tolist())))
    for _ in range(4):
        quietly(step, *batch())
    assert replays(step) == 1


def test_what_an_ordinary_pass_refuses() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    extended = packprop.extend(copy.deepcopy(model))
    x, y = batch()
    with packprop.record():
        loss = LOSS(extended(x), y)
    with pytest.raises(PackpropError) as eager, packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    step = compiled(model, extensions.BatchGrad())
    for _ in range(3):
        with pytest.raises(PackpropError) as own:
            step(x, y)
        assert str(own.value) == str(eager.value)
    assert not any(vars(module).get("_forward_pre_hooks") for module in model.modules())


class Lottery(nn.Module):
    """Draws from a generator that PyTorch does not know."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + random.random())


class Counting(nn.Module):
    """Counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class Remembering(nn.Module):
    """Keeps what it has computed."""

    last: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach()
        return x


class Masked(nn.Module):
    """Takes as many entries as there are."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.nonzero(x.detach() > 9).sum() * 0


class Rechecked(nn.Module):
    """Dropout that a checkpoint draws again."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3)).double()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


@one_in(3)
@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Lottery, "random numbers from Python or NumPy"),
        (Counting, "calls"),
        (Remembering, "last"),
        (Masked, "nonzero"),
        (Rechecked, "random|loss|gradient|replay"),
    ],
)
def test_what_a_graph_would_do_wrongly_is_left_to_passes(layer: type[nn.Module], words: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), layer(), nn.Linear(3, 3)).double()
    step = compiled(model, extensions.BatchL2Grad())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(6):
            step(*batch())
    (warning,) = [str(each.message) for each in said if issubclass(each.category, PackpropWarning)]
    assert re.search(words, warning)
    assert replays(step) == 0
    quietly(step, *batch())


class KeepingItsPart(nn.Module):
    """A loss that keeps a part of it for a log."""

    part: Tensor

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.part = F.cross_entropy(outputs, targets)
        return 2 * self.part


@pytest.mark.parametrize("hook", [None, lambda module, args: None])
def test_attributes_that_a_pass_leaves_are_never_stale(hook: Callable[..., None] | None) -> None:
    loss = packprop.extend(KeepingItsPart())
    if hook is not None:
        loss.register_forward_pre_hook(hook)
    step = compiled(network(), extensions.BatchL2Grad(), loss=loss)
    step(*batch())
    step(*batch())
    with pytest.warns(PackpropWarning, match="part"):
        step(*batch())
    for _ in range(3):
        value = step(*batch())
        torch.testing.assert_close(value, 2 * loss.part.detach())


def test_weights_that_a_hook_makes_anew_are_replayed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), torch.nn.utils.spectral_norm(nn.Linear(3, 3))).double()
    step = compiled(model)
    for _ in range(6):
        quietly(step, *batch())
    assert replays(step) > 0


def in_parallel(rank: int) -> list[str]:
    """Steps of models that exchange tensors; one rank has new shapes in each call, so it never traces."""

    def scaled(outputs: Tensor, targets: Tensor) -> Tensor:
        largest = outputs.detach().abs().max()
        torch.distributed.all_reduce(largest)
        return F.cross_entropy(outputs / largest, targets)

    said = []
    for model, loss in ((nn.parallel.DistributedDataParallel(network()), LOSS), (network(), scaled)):
        step = compiled(model, extensions.BatchL2Grad(), loss=loss)
        for number in range(6):
            step(*batch(5 + number * rank))
        assert replays(step) == 0
        said.append(str(step))
    return said


@thorough
@needs_groups
def test_models_that_exchange_tensors_are_not_traced() -> None:
    (parallel, by_hand), _ = in_processes(in_parallel, 2)
    assert "spread over processes" in parallel
    assert "c10d" in by_hand


def test_kinds_are_traced_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayer, "MOST", 2)
    model = network()
    step = compiled(model, extensions.BatchL2Grad())
    for size in (2, 3):
        for _ in range(4):
            quietly(step, *batch(size))
    with pytest.warns(PackpropWarning, match=r"another: tensor 0 of the batch: \[3, 3\] before, \[4, 3\] now"):
        step(*batch(4))
    for _ in range(4):
        check_call(step, model, LOSS, *batch(4), extensions.BatchL2Grad())
    assert replays(step) == 2
    quietly(step, *batch(2))
    assert replays(step) == 3


def test_calls_that_are_never_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayer, "SEEN", 4)
    step = compiled(network(), extensions.BatchL2Grad())
    for size in range(2, 6):
        step(*batch(size))
    with pytest.warns(PackpropWarning, match="tensor 0 of the batch"):
        step(*batch(6))
    quietly(step, *batch(7))
    assert len(step.kinds) <= 4


def test_an_input_that_requires_gradients() -> None:
    model = network()
    step = compiled(model, extensions.BatchL2Grad())
    x, y = batch()
    x.requires_grad_()
    with pytest.warns(PackpropWarning, match="requires gradients"):
        step(x, y)
    assert x.grad is not None


def test_a_parameter_that_is_nobodys() -> None:
    outside = nn.Parameter(torch.ones(3).double())

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output * outside, target)

    step = compiled(network(), extensions.BatchL2Grad(), loss=loss)
    step(*batch())
    with pytest.warns(PackpropWarning, match="belongs neither"):
        step(*batch())
    outside.grad = None
    step(*batch())
    assert outside.grad is not None
