"""Several backward passes through one graph, and several losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

import packprop
from packprop import extensions
from tests.cases import BY_NAME
from tests.references.per_sample import batch, each_row, network, rows_by_loop
from tests.references.running import (
    ROWS,
    Row,
    assert_near,
    backward,
    check_exact,
    check_sampled,
    forward,
    generator,
    make_all,
    reference,
    results,
)
from tests.selection import one_in


@one_in(3)
@each_row
def test_two_backward_passes_through_one_graph(row: Row) -> None:
    problem = BY_NAME["resnet"].problem(3)
    loss = forward(problem)
    found = []
    for retain in (True, False):
        with packprop.backpack(row(generator())):
            loss.backward(retain_graph=retain)
        found.append(results(problem, row.attribute))
        for parameter in problem.parameters.values():
            delattr(parameter, row.attribute)
    for name in found[0]:
        for first, second in zip(*(torch.atleast_1d(f[name][0]) for f in found), strict=True):
            assert_near(second, first, name, 1e-13)
    with pytest.raises(RuntimeError), packprop.backpack(row(generator())):
        loss.backward()


def test_extensions_changed_between_passes_through_one_graph() -> None:
    problem = BY_NAME["conv2d-deep"].problem(3)
    oracle = reference("conv2d-deep", 3, "mean")
    loss = forward(problem)
    for row in ROWS:
        if not row.sampled:
            with packprop.backpack(row()):
                loss.backward(retain_graph=True)
            check_exact(problem, oracle, row)


def test_plain_backward_first_then_extensions() -> None:
    problem = BY_NAME["linear-deep"].problem(3)
    loss = forward(problem)
    loss.backward(retain_graph=True)
    with packprop.backpack(*make_all(ROWS)):
        loss.backward()
    oracle = reference("linear-deep", 3, "mean")
    for row in ROWS:
        if not row.sampled:
            check_exact(problem, oracle, row)
    check_sampled(problem, oracle)


def test_two_losses_on_one_forward_pass() -> None:
    """Two backward passes from two losses over one kept graph: each its own numbers."""
    model, loss_function = packprop.extend(network()), packprop.extend(nn.CrossEntropyLoss())
    x, y = batch()
    other = (y + 1) % 3
    out = model(x)
    losses = [loss_function(out, y), loss_function(out, other)]
    for loss, target, retain in zip(losses, (y, other), (True, False), strict=True):
        with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
            loss.backward(retain_graph=retain)
        for name, expected in rows_by_loop(model, x, target).items():
            assert_near(model.get_parameter(name).grad_batch, expected, name)


def test_backward_twice_after_two_forward_passes() -> None:
    """Two forward passes, then each loss by itself: neither sees the other's uses."""
    model, loss_function = packprop.extend(network()), packprop.extend(nn.CrossEntropyLoss())
    batches = [batch(3), batch(5)]
    losses = [loss_function(model(x), y) for x, y in batches]
    for loss, (x, y) in zip(losses, batches, strict=True):
        with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
            loss.backward()
        for name, expected in rows_by_loop(model, x, y).items():
            assert_near(model.get_parameter(name).grad_batch, expected, name)


@one_in(3)
@pytest.mark.parametrize("names", [["3.weight"], ["0.weight", "6.bias"], ["6.weight", "6.bias"]])
@each_row
def test_backward_to_chosen_parameters(row: Row, names: list[str]) -> None:
    """``backward(inputs=...)``: only the chosen parameters get gradients and results."""
    whole, part = BY_NAME["conv2d-deep"].problem(3), BY_NAME["conv2d-deep"].problem(3)
    backward(whole, row(generator()))
    chosen = [part.parameters[name] for name in names]
    backward(part, row(generator()), inputs=chosen)
    for name, parameter in part.parameters.items():
        if name not in names:
            assert parameter.grad is None
            assert not hasattr(parameter, row.attribute), name
            continue
        assert_near(parameter.grad, whole.parameters[name].grad, name)
        expected, found = (getattr(p.parameters[name], row.attribute) for p in (whole, part))
        for a, b in zip(torch.atleast_1d(found[0]), torch.atleast_1d(expected[0]), strict=True):
            assert_near(a, b, name)


FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "one": lambda layer: layer.weight,
    "dictionary": lambda layer: {"weight": layer.weight},
    "iterator": lambda layer: iter([layer.weight]),
    "set": lambda layer: {layer.weight},
    "edge": lambda layer: [torch.autograd.graph.get_gradient_edge(layer.weight)],
}


@pytest.mark.parametrize("form", FORMS)
def test_chosen_parameters_in_any_form(form: str) -> None:
    """PyTorch takes them in each of these."""
    model, (x, y) = packprop.extend(network()), batch()
    with packprop.backpack(extensions.BatchGrad()):
        nn.functional.cross_entropy(model(x), y).backward(inputs=FORMS[form](model[0]))
    rows = rows_by_loop(model, x, y)["0.weight"]
    assert_near(model[0].weight.grad_batch, rows, "rows")
    assert_near(model[0].weight.grad, rows.sum(0), "gradient")
    assert model[0].bias.grad is None


@pytest.mark.parametrize("extension", [extensions.BatchGrad, extensions.DiagGGNExact, extensions.KFAC])
@pytest.mark.parametrize("to", ["inputs", "activations", "another leaf"])
def test_passes_to_no_parameter(extension: Any, to: str) -> None:
    """A pass restricted to tensors that are no parameters runs as it does without packprop."""
    torch.manual_seed(0)
    model = packprop.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    x = torch.randn(5, 3, requires_grad=True)
    hidden = model[0](x)
    chosen = {"inputs": x, "activations": hidden, "another leaf": torch.ones(2, requires_grad=True)}[to]
    loss = nn.functional.cross_entropy(model[2](model[1](hidden)), torch.tensor([0, 1, 0, 1, 1]))
    expected = torch.autograd.grad(loss, chosen, retain_graph=True, allow_unused=True)[0]
    with packprop.backpack(extension()):
        loss.backward(inputs=[chosen])
    if expected is not None:
        torch.testing.assert_close(chosen.grad, expected)
    assert all(p.grad is None and not vars(p) for p in model.parameters())
