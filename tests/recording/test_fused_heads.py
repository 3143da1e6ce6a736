"""A head and its loss in one function of PyTorch's: the same as the two functions that it is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import PackpropError, extensions
from packprop.engine.algebra.kronecker import Eigen
from packprop.engine.tensors.nesting import tensors_in
from tests.references.running import ROWS, Row, assert_near
from tests.selection import one_in

pytestmark = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="this PyTorch has no F.linear_cross_entropy"
)

SAMPLES, TOKENS, WIDTH, WORDS = 3, 4, 5, 6


class Headed(nn.Module):
    """A model that returns its loss: hidden states of each token, then a head, fused with its loss or not."""

    def __init__(self, fused: bool, options: Any = None, bias: bool = True, **kwargs: Any) -> None:
        super().__init__()
        self.fused, self.options, self.kwargs = fused, options, kwargs
        self.body, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, WORDS, bias=bias)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        hidden, weight, bias = self.body(x).tanh(), self.head.weight, self.head.bias
        hidden, targets = hidden.flatten(0, -2), targets.flatten(0, x.dim() - 2)
        if not self.fused:
            return F.cross_entropy(F.linear(hidden, weight, bias), targets, **self.kwargs)
        loss = F.linear_cross_entropy(
            hidden, weight, targets, linear_bias=bias, options=self.options, **self.kwargs
        )
        return loss.view(x.shape[:-1]) if loss.dim() else loss


def data(tokens: int | None = TOKENS, ignored: int = -100) -> tuple[Tensor, Tensor]:
    """Inputs ``[n, t, 3]`` and words, two of which are ignored."""
    shape = (SAMPLES,) if tokens is None else (SAMPLES, tokens)
    targets = torch.randint(WORDS, shape)
    targets.view(-1)[1] = targets.view(-1)[-1] = ignored
    return torch.randn(*shape, 3, dtype=torch.float64), targets


def value(model: nn.Module, row: Row, x: Tensor, targets: Tensor) -> dict[str, list[Tensor]]:
    """What an extension gives for a model that returns its loss."""
    with packprop.record():
        loss = packprop.extend(model)(x, targets)
    with packprop.backpack(row(torch.Generator().manual_seed(0))):
        (loss.sum() if loss.dim() else loss).backward()
    return {name: parts(getattr(p, row.attribute)) for name, p in model.named_parameters()}


def parts(found: Any) -> list[Tensor]:
    """The tensors of a result; of an eigendecomposition the values, because vectors may be any of a span."""
    return list(tensors_in(found.values if isinstance(found, Eigen) else found))


def both(row: Row, x: Tensor, targets: Tensor, **kwargs: Any) -> None:
    """Compare the fused head with the two functions."""
    two, one = Headed(False, **kwargs).double(), Headed(True, **kwargs).double()
    one.load_state_dict(two.state_dict())
    assert torch.equal(one(x, targets), two(x, targets))
    expected, found = value(two, row, x, targets), value(one, row, x, targets)
    for name, wanted in expected.items():
        for mine, theirs in zip(found[name], wanted, strict=True):
            assert_near(mine, theirs, name)


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "smoothing": {"label_smoothing": 0.2},
    "weights": {"weight": torch.arange(1.0, 1.0 + WORDS, dtype=torch.float64)},
    "ignored": {"ignore_index": 2},
    "no-bias": {"bias": False},
}


@one_in(5)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("kwargs", OPTIONS.values(), ids=OPTIONS)
def test_a_fused_head_is_two_functions(row: Row, kwargs: dict[str, Any]) -> None:
    both(row, *data(ignored=kwargs.get("ignore_index", -100)), **kwargs)


@one_in(2)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_probabilities_as_targets(row: Row) -> None:
    x, _ = data()
    both(row, x, torch.rand(SAMPLES, TOKENS, WORDS, dtype=torch.float64).softmax(-1))


@one_in(2)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_one_token_for_each_sample(row: Row) -> None:
    both(row, *data(None))


def test_gradients_of_single_samples() -> None:
    """Beside a loop over samples; the divisor of the mean counts the tokens of all."""
    x, targets = data()
    model = Headed(True).double()
    found = value(model, Row(extensions.BatchGrad, "grad_batch", 1), x, targets)
    norms = value(model, Row(extensions.BatchL2Grad, "batch_l2", 1), x, targets)
    summed = Headed(True, reduction="sum").double()
    summed.load_state_dict(model.state_dict())
    for sample in range(SAMPLES):
        loss = summed(x[sample : sample + 1], targets[sample : sample + 1]) / (targets != -100).sum()
        gradients = torch.autograd.grad(loss, list(summed.parameters()))
        for name, gradient in zip(found, gradients, strict=True):
            assert_near(found[name][0][sample], gradient, name)
            assert_near(norms[name][0][sample], gradient.square().sum(), name)


def test_the_head_is_one_of_linear_layers() -> None:
    """It has the two factors of one, and the loss is found in the model."""
    model = Headed(True).double()
    found = value(model, Row(extensions.KFLR, "kflr", 2), *data())
    assert [len(found[name]) for name in ("body.weight", "head.weight", "head.bias")] == [2, 2, 1]
    assert [len(factor) for factor in found["head.weight"]] == [WORDS, WIDTH]


@one_in(3)
@pytest.mark.parametrize("out_features", [(), (2,)], ids=["plain", "maps"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_module(row: Row, out_features: tuple[int, ...]) -> None:
    """The weight that the module reshapes before its use is still the weight of a linear layer."""
    x, targets = data(None)
    targets = torch.stack([targets] * 2, 1) if out_features else targets
    body = packprop.extend(nn.Linear(3, WIDTH).double())
    head = packprop.extend(
        nn.LinearCrossEntropyLoss(WIDTH, WORDS, out_features=out_features, bias=True).double()
    )

    def by_hand(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(hidden, head.linear.weight, head.linear.bias)
        return F.cross_entropy(logits.reshape(SAMPLES, WORDS, *out_features), targets)

    def values(loss_of: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        with packprop.record():
            loss = loss_of(body(x).tanh(), targets)
        with packprop.backpack(row(torch.Generator().manual_seed(0))):
            loss.backward()
        found = [parts(getattr(p, row.attribute)) for p in (*body.parameters(), *head.parameters())]
        return [part for each in found for part in each]

    for mine, theirs in zip(values(head), values(by_hand), strict=True):
        assert_near(mine, theirs, row.name)


def ask(extension: Any, loss: Tensor, parameter: Tensor) -> None:
    """Ask for an extension; of one that saves a product, for the product with ones."""
    with packprop.backpack(extension):
        loss.backward(retain_graph=True)
    found = getattr(parameter, extension.savefield)
    if not isinstance(found, Tensor):
        found(torch.ones_like(parameter)[None])


CHUNKED = {"kept": True, "consumed": False}


@pytest.mark.parametrize("kept", CHUNKED.values(), ids=CHUNKED)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_chunked_kernel_is_refused_by_name(row: Row, kept: bool) -> None:
    """It sums the gradient over all samples in the forward pass: there is nothing left to take apart."""
    options = nn.LinearCrossEntropyOptions(allow_retain_graph=kept)
    with pytest.raises(PackpropError) as raised:
        value(Headed(True, options).double(), row, *data())
    for word in ("linear_cross_entropy", "head.weight", "options=None", "torch.utils.checkpoint"):
        assert word in str(raised.value)


@one_in(2)
@pytest.mark.parametrize("row", [row for row in ROWS if row.order == 1], ids=lambda row: row.name)
def test_the_chunked_kernel_without_reduction(row: Row) -> None:
    """It returns one value for each token, so that gradients of single samples can be told apart."""
    x, targets = data()
    fused = Headed(True, nn.LinearCrossEntropyOptions(batch_chunk_size=2), reduction="none").double()
    apart = Headed(False, reduction="none").double()
    apart.load_state_dict(fused.state_dict())
    expected, found = value(apart, row, x, targets), value(fused, row, x, targets)
    for name, wanted in expected.items():
        for mine, theirs in zip(found[name], wanted, strict=True):
            assert_near(mine, theirs, name)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("row", [extensions.DiagHessian, extensions.HMP, extensions.GGNMP])
def test_the_chunked_kernel_has_no_second_derivative(row: Callable[[], Any], reduction: str) -> None:
    """PyTorch differentiates it twice without a word, and takes the second derivative for zero."""
    options = nn.LinearCrossEntropyOptions(allow_retain_graph=True)
    model = packprop.extend(Headed(True, options, reduction=reduction).double())
    loss = model(*data()).sum()
    extension = row()
    with pytest.raises(PackpropError, match=r"linear_cross_entropy|no recorded loss"):
        ask(extension, loss, model.body.weight)


@pytest.mark.parametrize("kept", CHUNKED.values(), ids=CHUNKED)
def test_a_frozen_chunked_head_has_no_second_derivative(kept: bool) -> None:
    options = nn.LinearCrossEntropyOptions(allow_retain_graph=kept)
    model = packprop.extend(Headed(True, options).double())
    model.head.requires_grad_(False)
    loss = model(*data())
    with pytest.raises(PackpropError, match="linear_cross_entropy"):
        ask(extensions.HMP(), loss, model.body.weight)


def test_the_second_derivative_of_the_chunked_kernel_is_zero_in_pytorch() -> None:
    """If this fails, PyTorch has been mended, and `WITHOUT_SECOND_DERIVATIVE` can go."""
    x, weight = torch.randn(4, WIDTH, requires_grad=True), torch.randn(WORDS, WIDTH)
    options = nn.LinearCrossEntropyOptions(allow_retain_graph=True)
    loss = F.linear_cross_entropy(x, weight, torch.arange(4), options=options)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    assert not gradient.requires_grad
