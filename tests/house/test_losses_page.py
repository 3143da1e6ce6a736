"""Losses made in other ways: what the page says works, and is right; what it says is refused is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import PackpropError, backpack, extend, extensions
from tests.house.pages import blocks_of, run

PAGE = "docs/guide/losses.md"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    torch.manual_seed(0)
    return run(PAGE, blocks_of(PAGE))


def rows_are_right(
    parameters: Sequence[nn.Parameter],
    whole: Callable[[], Tensor],
    single: Callable[[slice], Tensor],
    samples: int,
) -> None:
    """Gradients of single samples against loops of autograd, for a loss that is a mean over samples."""
    for parameter in parameters:
        parameter.grad = None
    with backpack(extensions.BatchGrad()):
        whole().backward()
    for n in range(samples):
        expected = torch.autograd.grad(single(slice(n, n + 1)), parameters, allow_unused=True)
        for parameter, each in zip(parameters, expected, strict=True):
            row = parameter.grad_batch[n]
            torch.testing.assert_close(samples * row, torch.zeros_like(row) if each is None else each)
    for parameter in parameters:
        rows: Tensor = parameter.grad_batch
        torch.testing.assert_close(rows.sum(0), parameter.grad, rtol=1e-4, atol=1e-5)


def refused(loss: Tensor, where: str, extension: Any = None) -> PackpropError:
    with (
        backpack(extension or extensions.BatchGrad()),
        pytest.raises(PackpropError, match=where) as error,
    ):
        loss.backward()
    return error.value


def test_learned_weights(names: dict[str, Any]) -> None:
    tasks, weighted, data = names["tasks"], names["weighted"], [names[key] for key in ("x", "kinds", "places")]
    with torch.no_grad():
        weighted.s.copy_(torch.tensor([0.3, -0.2]))

    def loss(part: slice) -> Tensor:
        x, *targets = (each[part] for each in data)
        found: Tensor = weighted(tasks(x), *targets)
        return found

    rows_are_right([*tasks.parameters()], lambda: loss(slice(None)), loss, 6)
    expected = torch.autograd.grad(loss(slice(None)), weighted.s)[0]
    weighted.s.grad = None
    with backpack(extensions.KFAC(), extensions.DiagGGNExact(), extensions.HMP()):
        loss(slice(None)).backward()
    torch.testing.assert_close(weighted.s.grad, expected)
    # the same with weights that nothing is asked of
    curved = tasks.body.weight.diag_ggn_exact.clone()
    weighted.s.requires_grad_(False)
    with backpack(extensions.DiagGGNExact()):
        loss(slice(None)).backward()
    torch.testing.assert_close(tasks.body.weight.diag_ggn_exact, curved)
    weighted.s.requires_grad_(True)


def test_learned_weights_of_an_extended_module_are_refused(names: dict[str, Any]) -> None:
    tasks, weighted = names["tasks"], names["Weighted"]()
    loss = extend(weighted)(tasks(names["x"]), names["kinds"], names["places"])
    assert "requires_grad=False" in refused(loss, "outside of every known loss function").instead
    weighted.requires_grad_(False)
    with backpack(extensions.BatchGrad()):
        weighted(tasks(names["x"]), names["kinds"], names["places"]).backward()


def test_derivatives_with_respect_to_inputs(names: dict[str, Any]) -> None:
    points, forward, layers = names["points"], names["forward"], names["layers"]
    rows_are_right(
        [*layers.parameters()],
        lambda: names["residual"](extend(layers), points),
        lambda part: names["residual"](layers, points[part]),
        20,
    )
    loss = names["loss"]
    parameters = [*layers.parameters()]
    rows_are_right(
        parameters,
        lambda: loss(forward(points), torch.zeros(20, 1)),
        lambda part: names["residual"](layers, points[part]),
        20,
    )
    with backpack(extensions.HMP(), extensions.DiagGGNExact(), extensions.KFAC()):
        loss(forward(points), torch.zeros(20, 1)).backward()
    weight = layers[2].weight
    vector = torch.randn_like(weight)
    (slope,) = torch.autograd.grad(names["residual"](layers, points), weight, create_graph=True)
    (expected,) = torch.autograd.grad(slope, weight, vector)
    torch.testing.assert_close(weight.hmp(vector), expected, rtol=1e-4, atol=1e-5)


def test_products_of_derivatives_with_respect_to_inputs(names: dict[str, Any]) -> None:
    layers, points = names["layers"], names["points"]
    parameters = [*layers.parameters()]
    vectors = [torch.randn_like(parameter) for parameter in parameters]
    found = packprop.products.hvp(lambda: names["residual"](layers, points), parameters, vectors)
    loss = names["residual"](layers, points)
    slopes = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    along = sum((s * v).sum() for s, v in zip(slopes, vectors, strict=True) if s is not None)
    assert isinstance(along, Tensor)
    expected = torch.autograd.grad(along, parameters, allow_unused=True)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(mine) if other is None else other)


def test_a_loss_that_a_model_writes_down(names: dict[str, Any]) -> None:
    tokens = names["tokens"]
    wrapper = extend(names["Own"](nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))))
    error = refused(wrapper(tokens), "the model's output, one number")
    assert "let the model return what the number is computed from, and compute the loss outside of it" in str(
        error
    )
    network, loss = names["network"], names["cross_entropy"]

    def value(part: slice) -> Tensor:
        found: Tensor = loss(network(tokens[part, :-1]).transpose(1, 2), tokens[part, 1:])
        return found

    rows_are_right([*network.parameters()], lambda: value(slice(None)), value, 4)


def test_a_loss_as_a_module_of_ones_own(names: dict[str, Any]) -> None:
    class Formula(nn.Module):
        def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
            return (scores.logsumexp(-1) - scores.gather(-1, targets[..., None])[..., 0]).mean()

    tokens, network, loss = names["tokens"], names["network"], extend(Formula())

    def value(part: slice) -> Tensor:
        found: Tensor = loss(network(tokens[part, :-1]), tokens[part, 1:])
        return found

    rows_are_right([*network.parameters()], lambda: value(slice(None)), value, 4)
    with backpack(extensions.DiagGGNExact()):
        value(slice(None)).backward()
    found = network[1].weight.diag_ggn_exact.clone()
    with backpack(extensions.DiagGGNExact()):
        names["cross_entropy"](network(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:]).backward()
    torch.testing.assert_close(found, network[1].weight.diag_ggn_exact)


def test_a_model_that_returns_a_loss_of_torch_works_inside_wrappers() -> None:
    torch.manual_seed(0)

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))

        def forward(self, tokens: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.network(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, tokens: Tensor) -> dict[str, Tensor]:
            return {"loss": self.inner(tokens)}

    model, tokens = extend(Outer()), torch.randint(20, (5, 7))
    rows_are_right(
        [*model.parameters()], lambda: model(tokens)["loss"], lambda part: model(tokens[part])["loss"], 5
    )
    norms = packprop.compute(model, None, [tokens], extensions.BatchL2Grad(), progress=False).norms()
    assert norms.shape == (5,)


def test_a_term_beside_the_loss(names: dict[str, Any]) -> None:
    model, squares, signals = names["quantized"], names["squares"], names["signals"]

    def loss(part: slice) -> Tensor:
        outputs, commitment = model(signals[part])
        found: Tensor = squares(outputs, signals[part]) + commitment
        return found

    rows_are_right([*model.parameters()], lambda: loss(slice(None)), loss, 12)
    with backpack(extensions.HMP(), extensions.BatchL2Grad()):
        loss(slice(None)).backward()
    for extension in (extensions.DiagGGNExact(), extensions.KFAC()):
        refused(loss(slice(None)), "without passing a recorded loss", extension)
