"""Inputs, parameters and losses that come in unusual ways."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.tensors.layout import possible_layouts
from tests.cases.models.wrapping import Apply
from tests.graph.one_by_one import check, double, rows_of
from tests.references.running import assert_near, assert_rows_of_terms, right_or_refused
from tests.selection import one_in


def test_inputs_that_come_by_another_way() -> None:
    """Data held by the module, or inside an object, is shown to ``record()``; or it is refused."""

    @dataclass
    class Batch:
        features: Tensor

    model = packprop.extend(
        double(
            Apply(
                lambda m, batch: m.head(torch.tanh(m.first(batch.features))),
                first=nn.Linear(3, 3),
                head=nn.Linear(3, 2),
            )
        )
    )
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    loss_function = packprop.extend(nn.MSELoss())
    with right_or_refused("record("):
        with packprop.backpack(extensions.BatchGrad()):
            loss_function(model(Batch(x)), y).backward()
        for name, expected in rows_of(model, lambda: model(Batch(x)), y).items():
            assert_near(model.get_parameter(name).grad_batch, expected, name)
    with packprop.record(x):
        loss = loss_function(model(Batch(x)), y)
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    for name, expected in rows_of(model, lambda: model(Batch(x)), y).items():
        assert_near(model.get_parameter(name).grad_batch, expected, name)


@pytest.mark.parametrize("kind", ["buffer", "frozen parameter"])
def test_an_input_that_is_part_of_the_model(kind: str) -> None:
    """A data set that the model holds."""

    class WithData(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            data = torch.randn(10, 3)
            self.data = nn.Buffer(data) if kind == "buffer" else nn.Parameter(data, requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.layer(x))

    model = WithData().double()
    check(model, model.data[2:7])


def test_a_parameter_that_is_an_input() -> None:
    """It is a parameter all the same: a use beside the model is not left out."""
    model = packprop.extend(double(Apply(lambda m, x, w: m.head(x @ w), head=nn.Linear(3, 2))))
    weight, x = nn.Parameter(torch.randn(3, 3).double()), torch.randn(4, 3).double()
    loss = F.cross_entropy(model(x, weight), torch.tensor([0, 1, 1, 0])) + (x.tanh() @ weight).square().mean()
    with (
        pytest.raises(packprop.PackpropError, match="outside of every known loss"),
        packprop.backpack(extensions.BatchGrad()),
    ):
        loss.backward()


def distances(h: Tensor, places: Tensor, first: bool = False) -> Tensor:
    h, places = (h[None], places[:, None]) if first else (h[:, None], places[None])
    found = F.mse_loss(*torch.broadcast_tensors(h, places), reduction="none").sum(-1)
    return -found.T if first else -found


INNER: dict[str, Callable[[Apply, Tensor], Tensor]] = {
    "prototypes": lambda m, x: distances(m.body(x), m.last.weight),
    "prototypes first": lambda m, x: distances(m.body(x), m.last.weight, True),
    "radial basis functions": lambda m, x: m.last(distances(m.body(x), m.body.weight.detach()).exp()),
    "twice": lambda m, x: distances(distances(m.body(x), m.last.weight), m.last.weight),
}


@pytest.mark.parametrize("name", INNER)
def test_a_loss_function_inside_of_the_model(name: str) -> None:
    """A distance is no loss of the pass, whatever function computes it; in later passes either."""
    model = double(Apply(INNER[name], body=nn.Linear(3, 3), last=nn.Linear(3, 3)))
    if name != "radial basis functions":
        model.last.bias = None
    for _ in range(3):
        check(model, torch.randn(4, 3).double())


def test_a_loss_that_another_one_takes_as_well() -> None:
    """It is a loss all the same, as in a model that learns to foretell its loss."""
    model = double(
        Apply(lambda m, x: (m.head(x), m.guess(x)[:, 0]), head=nn.Linear(3, 2), guess=nn.Linear(3, 1))
    )
    out, guess = model(torch.randn(4, 3).double())
    losses = F.cross_entropy(out, torch.tensor([0, 1, 1, 0]), reduction="none")
    terms = losses + (guess - losses).square()
    loss = losses.sum() + F.mse_loss(guess, losses, reduction="sum")
    assert_rows_of_terms(terms, loss, model.parameters())


def test_functional_call() -> None:
    model = packprop.extend(double(nn.Linear(3, 2)))
    swapped = {k: nn.Parameter(2 * p.detach()) for k, p in model.named_parameters()}
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    out = torch.func.functional_call(model, swapped, (x,))
    loss = packprop.extend(nn.MSELoss())(out, y)
    with packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    for parameter in swapped.values():
        assert_near(parameter.grad_batch.sum(0), parameter.grad, "rows")
    assert not any(hasattr(p, "grad_batch") for p in model.parameters())


def test_a_gradient_penalty() -> None:
    """The gradient inside the loss uses parameters, too."""
    model = packprop.extend(double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))))
    x = torch.randn(4, 3).double().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    terms = ((slope.norm(dim=1) - 1).square() + out[:, 0]) / 4
    loss = (slope.norm(dim=1) - 1).square().mean() + out.mean()
    assert_rows_of_terms(terms, loss, model.parameters())


def test_a_parameter_that_is_not_reached() -> None:
    """No gradient, no quantity; the others are right."""
    model = Apply(lambda m, x: m.used(x), used=nn.Linear(3, 2), idle=nn.Linear(3, 2))
    packprop.extend(double(model))
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        packprop.extend(nn.MSELoss())(model(x), y).backward()
    assert model.idle.weight.grad is None
    assert not hasattr(model.idle.weight, "grad_batch")
    assert not hasattr(model.idle.weight, "diag_ggn_exact")
    assert model.used.weight.grad_batch.shape == (4, 2, 3)


def test_parameters_frozen_between_forward_and_backward_passes() -> None:
    model = packprop.extend(double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))))
    x = torch.randn(4, 3).double()
    model[0].weight.requires_grad_(False)
    check(model, x)
    assert not hasattr(model[0].weight, "grad_batch")
    model[0].weight.requires_grad_(True)
    check(model, x)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: x.to(memory_format=torch.channels_last), id="channels-last"),
        pytest.param(lambda x: x.transpose(2, 3), id="transposed"),
        pytest.param(lambda x: x[:1].expand(4, -1, -1, -1), id="expanded"),
        pytest.param(lambda x: x[:, :, ::2], id="strided"),
        pytest.param(lambda x: x.requires_grad_(), id="requires-grad"),
    ],
)
def test_layouts_of_memory(change: Callable[[Tensor], Tensor]) -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.GroupNorm(1, 3), nn.Tanh(), nn.ConvTranspose2d(3, 1, 2), nn.PReLU()
    )
    check(double(model), change(torch.randn(4, 2, 4, 4).double()))


def test_automatic_mixed_precision() -> None:
    """Under autocast results have the parameters' precision and the accuracy of bfloat16."""
    model = packprop.extend(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)))
    loss_function = packprop.extend(nn.MSELoss())
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_function(model(x), y)
    with packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact(), extensions.KFAC()):
        loss.backward()
    for name, expected in rows_of(model, lambda: model(x), y).items():
        parameter = model.get_parameter(name)
        assert parameter.grad_batch.dtype == torch.float32
        assert_near(parameter.grad_batch, expected, name, 0.05)
        assert parameter.diag_ggn_exact.dtype == torch.float32
        assert parameter.kfac[0].dtype == torch.float32


@one_in(3)
@pytest.mark.parametrize("samples", [2, 5, 300])
@pytest.mark.parametrize("depth", [0, 8])
@pytest.mark.parametrize("where", ["all", "unrecorded", "model", "converted", "region"])
def test_samples_are_told_apart_in_the_range_of_float16(where: str, depth: int, samples: int) -> None:
    """Also where the loss takes float32, and what overflows is between it and the uses."""
    hidden = [part for _ in range(depth) for part in (nn.Linear(16, 16), nn.Tanh())]
    model = packprop.extend(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), *hidden, nn.Linear(16, 4)))
    plain, half = packprop.restore(copy.deepcopy(model)), torch.float16
    x, y = torch.randn(samples, 3), torch.randint(4, (samples,))

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", half, enabled=where != "region"):
            out = model(x)
            if where in ("all", "unrecorded"):
                return F.cross_entropy(out, y)
        if where == "region":  # no parameter is used in it
            out = (out.half() * 32).softmax(-1).float()
        return F.cross_entropy(out.double() if where == "converted" else out.float(), y)

    with packprop.backpack(extensions.BatchGrad()):
        with contextlib.nullcontext() if where == "unrecorded" else packprop.record():
            total = loss(model) * 1024
        total.backward()
    (loss(plain) * 1024).backward()
    for (name, parameter), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, reference.grad)
        assert_near(parameter.grad_batch.sum(0), reference.grad, name, 0.05)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_samples_that_are_mixed_under_autocast_are_refused(dtype: torch.dtype) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.last((h - h.mean(0)).tanh())

    model = packprop.extend(Model())
    with torch.autocast("cpu", dtype):
        out = model(torch.randn(6, 3))
    with packprop.record():
        loss = F.cross_entropy(out.float(), torch.arange(6) % 4)
    with packprop.backpack(extensions.BatchGrad()), pytest.raises(packprop.PackpropError, match="mixed"):
        loss.backward()


def test_several_losses_given_to_backward() -> None:
    """``torch.autograd.backward([a, b])`` is the backward pass of their sum."""
    models = [double(nn.Linear(3, 2)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    loss_function = packprop.extend(nn.MSELoss())
    asked = [extensions.BatchGrad(), extensions.DiagGGNExact()]
    for model, joint in zip(models, (True, False), strict=True):
        packprop.extend(model)
        out = model(x)
        a, b = loss_function(out, y), loss_function(2 * out, y)
        with packprop.backpack(*asked):
            if joint:
                torch.autograd.backward([a, b])
            else:
                (a + b).backward()
    for attribute in ("grad", "grad_batch", "diag_ggn_exact"):
        first, second = (getattr(m.weight, attribute) for m in models)
        assert_near(first, second, attribute)
    assert_near(models[0].weight.grad_batch.sum(0), models[0].weight.grad, "rows")


def test_packed_sequences_are_right_or_refused() -> None:
    """Time steps of all samples in one axis, shorter samples leaving early."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            _, state = self.rnn(packed)
            return self.head(state[-1])

    model = double(Packed())
    x = torch.randn(3, 4, 2).double()
    for lengths in (torch.tensor([4, 4, 4]), torch.tensor([2, 4, 3]), torch.tensor([3, 4, 2])):
        with right_or_refused("rnn"):
            check(model, x, lengths)


@pytest.mark.parametrize("shape", [(6,), (6, 4), (4, 6, 3), (2, 3, 6), (6, 12), (12, 6, 5)])
@pytest.mark.parametrize("samples", [1, 2, 3, 6])
def test_the_shape_with_samples_in_front_is_that_of_the_tensor(shape: tuple[int, ...], samples: int) -> None:
    tensor = torch.randn(shape)
    for layout in possible_layouts(tensor.shape, samples):
        front = layout.to_front(tensor)
        assert front.shape == layout.front_shape(tensor.shape), layout
        assert torch.equal(layout.from_front(front), tensor), layout
