"""Reentrant checkpoints: right, or refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import extensions
from packprop.engine.recording.marks import Use
from packprop.errors import PackpropError
from tests.recording.saving import WAYS, Net, Wrap, assert_equal, plain
from tests.references.running import ROWS, generator
from tests.selection import often, thorough


def test_an_input_that_is_data() -> None:
    """A reentrant checkpoint as the first block of a model: PyTorch wants its input to require a gradient."""

    def go(wrap: Wrap) -> dict[str, Any]:
        torch.manual_seed(0)
        model = packprop.extend(nn.Linear(5, 3).double())
        x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
        with packprop.record(x):
            out = wrap(lambda x: torch.tanh(model(x)), x)
        loss = packprop.extend(nn.CrossEntropyLoss())(out, torch.tensor([0, 1, 2, 0]))
        with packprop.backpack(*(row(generator()) for row in ROWS)):
            loss.backward()
        assert x.grad is not None
        found = {(n, r.attribute): getattr(p, r.attribute) for n, p in model.named_parameters() for r in ROWS}
        return found | {"x": x.grad}

    assert_equal(go(WAYS["reentrant"]), go(plain))


def test_several_inputs_and_outputs() -> None:
    """With a tensor that needs no gradient, something that is no tensor, and an output that is not used."""

    class Pair(nn.Module):
        def __init__(self, wrap: Callable[..., Any]) -> None:
            super().__init__()
            self.wrap = wrap
            self.first, self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def block(self, x: Tensor, power: int, mask: Tensor) -> tuple[Tensor, int, Tensor, Tensor]:
            return torch.tanh(self.a(x)) * mask, power, self.b(x) ** power, self.a(x)

        def forward(self, x: Tensor) -> Tensor:
            one, power, two, _ = self.wrap(self.block, self.first(x), 2, x[:, :4].abs())
            return one * power + two

    def go(wrap: Callable[..., Any]) -> dict[str, Any]:
        torch.manual_seed(0)
        model = packprop.extend(Pair(wrap).double())
        x, y = torch.randn(3, 5, dtype=torch.float64), torch.tensor([0, 3, 1])
        with packprop.backpack(*(row(generator()) for row in ROWS)):
            packprop.extend(nn.CrossEntropyLoss())(model(x), y).backward()
        return {(n, r.attribute): getattr(p, r.attribute) for n, p in model.named_parameters() for r in ROWS}

    assert_equal(go(partial(checkpoint, use_reentrant=True)), go(lambda function, *inputs: function(*inputs)))


def refusal(model: nn.Module, x: Tensor, *asked: Any, **options: Any) -> str:
    loss = packprop.extend(nn.CrossEntropyLoss())(packprop.extend(model)(x), torch.zeros(len(x)).long())
    with pytest.raises(PackpropError) as caught, packprop.backpack(*asked):
        loss.backward(**options)
    assert "use_reentrant=False" in str(caught.value)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("first", [True, False], ids=["above-layers", "between-layers"])
def test_a_checkpoint_without_parameters(first: bool) -> None:
    """Sweeps come through it, and its node has its own backward pass again afterwards."""

    def go(wrap: Wrap) -> dict[str, Any]:
        torch.manual_seed(0)
        lower, upper = nn.Linear(5, 4).double(), nn.Linear(4, 3).double()
        model = packprop.extend(nn.ModuleList([lower, upper]))
        x = torch.randn(4, 5, dtype=torch.float64)
        with packprop.record(x):
            h = lower(x)
            h = wrap(lambda h: F.layer_norm(h.sin(), (4,)), h)
            out = upper(h) if first else wrap(torch.tanh, upper(h))
        loss = packprop.extend(nn.CrossEntropyLoss())(out, torch.tensor([0, 1, 2, 0]))
        with packprop.backpack(*(row(generator()) for row in ROWS)):
            loss.backward()
        return {(n, r.attribute): getattr(p, r.attribute) for n, p in model.named_parameters() for r in ROWS}

    assert_equal(go(WAYS["reentrant"]), go(plain))


def test_differentiating_a_reentrant_checkpoint_twice_is_refused() -> None:
    model = Net(WAYS["reentrant"])
    message = refusal(model, torch.randn(3, 6), extensions.Variance(), create_graph=True)
    assert "create_graph=True" in message
    assert not any(hasattr(p, "variance") for p in model.parameters())


def test_a_parameter_as_an_argument_is_refused() -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(5, 4), nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(F.linear, self.first(x), self.weight, use_reentrant=True)

    assert "arguments" in refusal(Given(), torch.randn(3, 5), extensions.BatchGrad())


@pytest.mark.parametrize("runs", [(False, False, True), (False, True, False), (False, False, False, True)])
def test_a_function_that_takes_a_layer_in_some_runs_alone_is_refused(runs: tuple[bool, ...]) -> None:
    """The first run is the forward pass, the second one shows what the checkpoint holds."""
    takes = [*runs]

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Linear(5, 4), nn.Linear(4, 4)

        def inside(self, x: Tensor) -> Tensor:
            return self.layer(x) if takes.pop(0) else 2 * x

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inside, self.first(x), use_reentrant=True)

    message = refusal(Sometimes(), torch.randn(3, 5), extensions.BatchGrad())
    assert "it called other functions than the first time" in message


def test_a_loss_in_a_reentrant_checkpoint_is_refused() -> None:
    layer = packprop.extend(nn.Linear(5, 3))
    x = torch.randn(4, 5, requires_grad=True)
    with packprop.record(x):
        loss = checkpoint(lambda x: F.cross_entropy(layer(x), torch.zeros(4).long()), x, use_reentrant=True)
    with pytest.raises(PackpropError, match="a loss in it"), packprop.backpack(extensions.BatchGrad()):
        loss.backward()


def test_the_node_gets_its_own_backward_pass_back() -> None:
    model = packprop.extend(Net(WAYS["reentrant"]).eval())
    loss = packprop.extend(nn.CrossEntropyLoss())(model(torch.randn(3, 6)), torch.tensor([0, 1, 2]))
    with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss.backward(retain_graph=True)
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    loss.backward()
    assert_equal({n: p.grad for n, p in model.named_parameters()}, found)


@thorough
@pytest.mark.usefixtures("_new_objects_only")
@often(lambda way: way == "reentrant")
@pytest.mark.parametrize("way", ["checkpoint", "nested", "reentrant", "reentrant twice", "save_on_cpu"])
def test_a_training_loop_does_not_grow(way: str) -> None:
    """The garbage collector is off, so reference cycles in what a pass leaves behind would be seen."""

    def living() -> int:
        return sum(isinstance(obj, (Tensor, Use)) for obj in gc.get_objects())

    torch.manual_seed(0)
    model, loss = packprop.extend(Net(WAYS[way])), packprop.extend(nn.CrossEntropyLoss())
    gc.collect()
    gc.disable()
    try:
        counts = []
        for step in range(8):
            value = loss(model(torch.randn(4, 6)), torch.randint(3, (4,)))
            with packprop.backpack(*(row() for row in ROWS)):
                value.backward()
            if step in (3, 7):
                counts.append(living())
        assert counts[0] == counts[1]
    finally:
        gc.enable()
