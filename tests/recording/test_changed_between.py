"""What is changed between forward and backward pass does not matter, or is noticed."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from tests.references.per_sample import batch, check_rows
from tests.references.running import assert_near
from tests.selection import one_in


def rows_of(loss: Tensor) -> None:
    """A backward pass that asks for gradients of single samples."""
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()


class Functional(nn.Module):
    """One function of the inputs, a weight and a bias."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(3, 3).double())
        self.bias = nn.Parameter(torch.randn(3).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: F.linear(x, w, b),
        lambda x, w, b: (x @ w) + b,
        lambda x, w, b: F.layer_norm(x, (3,), w[0], b),
        lambda x, w, b: x * w[0] + b,
        lambda x, w, b: torch.einsum("ni,oi->no", x, w) + b,
    ],
)
def test_an_input_that_was_changed_is_refused(function: Callable[..., Tensor]) -> None:
    """In autograd's words, which a plain pass would raise, too; the weight gets nothing."""
    model, (x, y) = packprop.extend(Functional(function)), batch()
    x = x[:, :3].clone()
    loss = F.cross_entropy(model(x), y)
    x.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed in place"):
        rows_of(loss)
    assert not hasattr(model.weight, "grad_batch")
    assert model.weight.grad is None
    x.div_(2)
    check_rows(model, x, y)


def _cells(kind: Callable[[int, int], nn.Module]) -> nn.Module:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = kind(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out = self.cell(x)
            return out[0] if isinstance(out, tuple) else out

    return Steps().double()


def _layer(layer: nn.Module) -> nn.Module:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x[:, None])[0][:, 0]

    return Layer().double()


EVALUATED_AGAIN = {
    "rnn": lambda: _layer(nn.RNN(3, 3, batch_first=True)),
    "gru": lambda: _layer(nn.GRU(3, 3, batch_first=True)),
    "lstm": lambda: _layer(nn.LSTM(3, 3, batch_first=True)),
    "rnn-cell": lambda: _cells(nn.RNNCell),
    "gru-cell": lambda: _cells(nn.GRUCell),
    "lstm-cell": lambda: _cells(nn.LSTMCell),
    "hypot": lambda: Functional(lambda x, w, b: torch.hypot(x, w[0]) + b),
    "solve": lambda: Functional(lambda x, w, b: torch.linalg.solve(w, x, left=False) + b),
}
"""Functions that are evaluated again in the backward pass, by a rule or by the fallback."""


@one_in(2)
@pytest.mark.parametrize("what", ["parameters", "inputs"])
@pytest.mark.parametrize("kind", EVALUATED_AGAIN)
@pytest.mark.parametrize("offloaded", [False, True])
def test_what_is_evaluated_again_has_not_changed(kind: str, what: str, offloaded: bool) -> None:
    """Autograd used what it had saved, or refuses: rows of the new values are nobody's."""
    model, (x, y) = packprop.extend(EVALUATED_AGAIN[kind]()), batch()
    hooks = torch.autograd.graph.save_on_cpu() if offloaded else contextlib.nullcontext()
    with hooks:
        loss = F.cross_entropy(model(x), y)
    with torch.no_grad():
        for tensor in model.parameters() if what == "parameters" else [x]:
            tensor.add_(0.5)
    refusal = None
    try:
        rows_of(loss)
    except RuntimeError as error:
        refusal = str(error)
    if refusal is not None:
        own = "changed in place" in refusal and "before an optimizer's step" in refusal
        assert own or "modified by an inplace operation" in refusal  # autograd's words
    else:
        for parameter in model.parameters():
            assert_near(parameter.grad_batch.sum(0), parameter.grad, kind)


@pytest.mark.parametrize("kind", EVALUATED_AGAIN)
def test_a_step_after_the_pass_is_what_the_error_asks_for(kind: str) -> None:
    model, (x, y) = packprop.extend(EVALUATED_AGAIN[kind]()), batch()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        rows_of(F.cross_entropy(model(x), y))
        for parameter in model.parameters():
            assert_near(parameter.grad_batch.sum(0), parameter.grad, kind)
        optimizer.step()


def test_what_was_changed_behind_autograds_back() -> None:
    """No version tells of writes to ``.data``; nodes that are called as they are use what they have saved."""
    model, (x, y) = packprop.extend(EVALUATED_AGAIN["gru"]()), batch()
    loss = F.cross_entropy(model(x), y)
    for parameter in model.parameters():
        parameter.data.add_(0.5)
    rows_of(loss)
    for parameter in model.parameters():
        assert_near(parameter.grad_batch.sum(0), parameter.grad, "gru")


def test_a_weight_that_was_changed_matters_no_more_than_to_autograd() -> None:
    """An affine map of the data does not need its weight again."""
    model, (x, y) = packprop.extend(Functional(F.linear)), batch()
    x = x[:, :3]
    rows_of(F.cross_entropy(model(x), y))
    expected = model.weight.grad_batch.clone()
    loss = F.cross_entropy(model(x), y)
    with torch.no_grad():
        model.weight.zero_()
    rows_of(loss)
    assert torch.equal(model.weight.grad_batch, expected)


@pytest.mark.parametrize("before", [True, False])
def test_what_is_trained_is_decided_in_the_forward_pass(before: bool) -> None:
    """A bias that is frozen, or no longer frozen, when the backward pass begins."""
    model, (x, y) = packprop.extend(Functional(F.linear)), batch()
    model.bias.requires_grad_(before)
    loss = F.cross_entropy(model(x[:, :3]), y)
    model.bias.requires_grad_(not before)
    rows_of(loss)
    assert hasattr(model.weight, "grad_batch")
    assert hasattr(model.bias, "grad_batch") == before


def test_lists_of_operands_may_be_changed() -> None:
    """The list that a function was given is the user's."""
    operands: list[Tensor] = []

    def product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        operands[:] = [x, weight]
        return torch.einsum("ni,oi->no", operands) + bias

    model, (x, y) = packprop.extend(Functional(product)), batch()
    loss = F.cross_entropy(model(x[:, :3]), y)
    operands.clear()
    rows_of(loss)
    reference = torch.stack(
        [
            torch.autograd.grad(F.cross_entropy(model(x[n : n + 1, :3]), y[n : n + 1]), model.weight)[0]
            for n in range(len(x))
        ]
    ) / len(x)
    assert torch.allclose(model.weight.grad_batch, reference)


@pytest.mark.parametrize(
    ("function", "frozen"),
    [
        (F.linear, True),
        (lambda x, w, b: torch.addmm(x, x.detach(), w) + b, False),
        (lambda x, w, b: x + b, False),
    ],
)
def test_inputs_that_no_entry_needs_are_not_kept(function: Callable[..., Tensor], frozen: bool) -> None:
    """Where a bias alone is trained, neither autograd nor packprop holds what went in."""
    inputs: list[weakref.ref[Tensor]] = []

    def watched(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        hidden = x + 1
        inputs.append(weakref.ref(hidden))
        return function(hidden, weight, bias)

    model, (x, _) = packprop.extend(Functional(watched)), batch()
    model.weight.requires_grad_(not frozen)
    out = model(x[:, :3])
    gc.collect()
    assert out.requires_grad
    assert inputs[0]() is None


def test_lazy_modules_are_made_in_their_first_call() -> None:
    torch.manual_seed(0)
    model, (x, y) = (
        packprop.extend(nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.Linear(5, 3)).double()),
        batch(),
    )
    with packprop.record():
        loss = F.cross_entropy(model(x), y)
    rows_of(loss)
    with packprop.disable():
        for n in range(len(x)):
            alone = F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]) / len(x)
            (expected,) = torch.autograd.grad(alone, [model[0].weight])
            torch.testing.assert_close(model[0].weight.grad_batch[n], expected)


@pytest.mark.parametrize("row", [extensions.BatchGrad, extensions.DiagGGNExact])
def test_a_target_that_has_changed_is_named_by_autograd(row: type[packprop.Extension]) -> None:
    """packprop took the error for that of a graph that was freed, and advised to retain it."""
    model, (x, _) = packprop.extend(nn.Linear(3, 3).double()), batch()
    target = torch.zeros(len(x), 3).double()
    loss = packprop.extend(nn.MSELoss())(model(x), target)
    target.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), packprop.backpack(row()):
        loss.backward()
