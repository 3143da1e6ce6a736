"""Training loops do not grow, and graphs and models die when they are let go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn

import packprop
from packprop import extensions
from tests.cases.models.convolutional import ResNet
from tests.references.per_sample import batch, images, network
from tests.references.running import FIRST_ORDER, ROWS, Row, make_all
from tests.selection import often, thorough


def living_tensors() -> int:
    """Tensors that the garbage collector can see, without running it."""
    return sum(isinstance(obj, Tensor) for obj in gc.get_objects())


@pytest.fixture
def _no_garbage_collection(_new_objects_only: None) -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def loops() -> list[Any]:
    models: list[tuple[str, Callable[[], nn.Module], Callable[[], Any]]] = [
        ("linear", network, batch),
        ("resnet", lambda: ResNet().double().eval(), lambda: images(3)),
    ]
    return [pytest.param(*rest, id=name) for name, *rest in models]


@often(lambda build, data, rows: rows is ROWS and build is network)
@pytest.mark.usefixtures("_no_garbage_collection")
@pytest.mark.parametrize("rows", [FIRST_ORDER, ROWS], ids=["first-order", "all"])
@pytest.mark.parametrize(("build", "data"), loops())
def test_a_training_loop_does_not_grow(
    build: Callable[[], nn.Module], data: Callable[[], Any], rows: list[Row]
) -> None:
    model, loss_function = packprop.extend(build()), packprop.extend(nn.CrossEntropyLoss())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    counts = []
    steps = 100 if rows is FIRST_ORDER else 40
    for step in range(steps):
        x, y = data()
        optimiser.zero_grad()
        loss = loss_function(model(x), y)
        with packprop.backpack(*(row() for row in rows)):
            loss.backward()
        optimiser.step()
        if step in (steps // 4, steps - 1):
            counts.append(living_tensors())
    assert counts[0] == counts[1]


@thorough
@pytest.mark.usefixtures("_no_garbage_collection")
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("rows", [FIRST_ORDER, ROWS], ids=["first-order", "all"])
def test_a_loop_that_differentiates_again_does_not_grow(rows: list[Row]) -> None:
    """With ``create_graph`` gradients are part of a graph, which goes when the user lets go of it."""
    model, loss_function = packprop.extend(network()), packprop.extend(nn.CrossEntropyLoss())
    counts = []
    steps = 100 if rows is FIRST_ORDER else 40
    for step in range(steps):
        x, y = batch()
        loss = loss_function(model(x), y)
        with packprop.backpack(*(row() for row in rows)):
            loss.backward(create_graph=True)
        total = sum(p.variance.sum() for p in model.parameters())
        torch.autograd.grad(total, list(model.parameters()))
        del total, loss
        for parameter in model.parameters():
            parameter.grad = None
            for row in rows:
                delattr(parameter, row.attribute)
        if step in (steps // 4, steps - 1):
            counts.append(living_tensors())
    assert counts[0] == counts[1]


@pytest.mark.usefixtures("_no_garbage_collection")
@pytest.mark.parametrize("mode", ["backward", "no-backward", "plain-backward", "disabled", "no-grad"])
def test_activations_die_with_the_graph(mode: str) -> None:
    """Nothing that a forward pass made is kept once the user has let go of it."""
    model, loss_function = packprop.extend(network()), packprop.extend(nn.CrossEntropyLoss())
    x, y = batch()
    held: list[weakref.ref[Tensor]] = [weakref.ref(x)]
    handle = model[0].register_forward_hook(lambda m, a, out: held.append(weakref.ref(out)))
    if mode == "disabled":
        with packprop.disable():
            out = model(x)
    elif mode == "no-grad":
        with torch.no_grad():
            out = model(x)
    else:
        out = model(x)
    loss = loss_function(out, y)
    if mode == "backward":
        with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
            loss.backward()
    elif mode == "plain-backward":
        loss.backward()
    held += [weakref.ref(out), weakref.ref(loss)]
    del x, y, out, loss
    handle.remove()
    assert [reference() is None for reference in held] == [True] * len(held)


class WithPlaces(nn.Module):
    """A decoder's beginning: nothing in the graph says whether the places are data."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(9, 4), nn.Embedding(3, 4), nn.Linear(4, 5)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(words) + self.places(torch.arange(3)))).mean(1)


@pytest.mark.usefixtures("_no_garbage_collection")
@pytest.mark.parametrize("rows", [[extensions.BatchGrad], [extensions.KFAC]], ids=["grad", "kfac"])
def test_a_graph_with_undecided_uses_dies_without_the_garbage_collector(rows: list[Any]) -> None:
    """A batch of a large model saves as much as all results take; a few of them would fill the memory."""
    torch.manual_seed(0)
    model, loss_function = packprop.extend(WithPlaces()), packprop.extend(nn.CrossEntropyLoss())
    nodes: list[weakref.ref[Any]] = []

    class Mark:
        """Lives as long as a node."""

    for _ in range(2):
        hidden = model(torch.randint(9, (6, 3)))
        loss = loss_function(hidden, torch.randint(5, (6,)))
        mark = hidden.grad_fn.metadata["of this test"] = Mark()
        nodes.append(weakref.ref(mark))
        with packprop.backpack(*(row() for row in rows)):
            loss.backward()
        del hidden, loss, mark
    assert [node() for node in nodes] == [None, None]


@pytest.mark.usefixtures("_no_garbage_collection")
def test_inputs_of_layers_are_freed_by_the_backward_pass() -> None:
    """After the backward pass a loss that is still held keeps no activation alive, as in plain autograd."""
    model, loss_function = packprop.extend(network()), packprop.extend(nn.CrossEntropyLoss())
    x, y = batch()
    hidden: list[weakref.ref[Tensor]] = []
    handle = model[1].register_forward_hook(lambda m, a, out: hidden.append(weakref.ref(out)))
    loss = loss_function(model(x), y)
    handle.remove()
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    assert hidden[0]() is None
    assert loss.grad_fn is not None


@pytest.mark.usefixtures("_no_garbage_collection")
def test_models_die_when_the_user_lets_go() -> None:
    model, loss_function = packprop.extend(network()), packprop.extend(nn.CrossEntropyLoss())
    x, y = batch()
    with packprop.backpack(*make_all(ROWS)):
        loss_function(model(x), y).backward()
    watched = [weakref.ref(p) for p in model.parameters()] + [weakref.ref(model)]
    del model
    assert all(reference() is None for reference in watched)
