"""Where the samples are: right when shapes mislead, when draws are random, when batches change.

The reference here is the definition itself: the whole batch goes through the model once, and the
gradient of each entry of the unreduced loss is taken by itself. Unlike one-sample forward passes it
also covers dropout and other noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from packprop.tensors.layout import possible_layouts
from tests.cases.models.wrapping import Apply, Raw
from tests.references.mixing import MIXING
from tests.references.running import assert_near, right_or_refused


def rows_of(
    model: nn.Module, forward: Callable[[], Tensor], target: Tensor, seed: int = 0
) -> dict[str, Tensor]:
    """Per-sample gradients of a mean squared error, from one forward pass over the whole batch."""
    parameters = {k: p for k, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(seed)
    with packprop.disable():
        terms = (forward() - target).square().flatten(1).sum(1) / target.numel()
    rows = [
        torch.autograd.grad(
            term,
            list(parameters.values()),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        for term in terms
    ]
    return {k: torch.stack(r) for k, r in zip(parameters, zip(*rows, strict=True), strict=True)}


def check(model: nn.Module, *inputs: Any, seed: int = 0, forward: Callable[[], Tensor] | None = None) -> None:
    """BatchGrad and the GGN diagonal of a mean squared error, against the definition."""
    packprop.extend(model)
    run = forward or (lambda: model(*inputs))
    with torch.no_grad():
        torch.manual_seed(seed)
        target = torch.randn_like(run())
    torch.manual_seed(seed)
    loss = packprop.extend(nn.MSELoss())(run(), target)
    with packprop.backpack(extensions.BatchGrad(), extensions.BatchDiagGGNExact()):
        loss.backward()
    diagonals = diagonals_of(model, run, seed)
    for name, expected in rows_of(model, run, target, seed).items():
        parameter = model.get_parameter(name)
        assert_near(parameter.grad_batch, expected, f"grad_batch of {name}", 1e-9, floor=1e-6)
        found = parameter.diag_ggn_exact_batch
        assert_near(found, diagonals[name], f"diag_ggn_exact_batch of {name}", 1e-9, floor=1e-6)


def diagonals_of(model: nn.Module, forward: Callable[[], Tensor], seed: int = 0) -> dict[str, Tensor]:
    """GGN diagonals by sample of a mean squared error: squares of the Jacobian's rows."""
    parameters = {k: p for k, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(seed)
    with packprop.disable():
        output = forward()
    sums = {k: torch.zeros(len(output), *p.shape).to(p) for k, p in parameters.items()}
    for n, row in enumerate(output.flatten(1)):
        for entry in row:
            gradients = torch.autograd.grad(
                entry,
                list(parameters.values()),
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for name, gradient in zip(parameters, gradients, strict=True):
                sums[name][n] += 2 / output.numel() * gradient.square()
    return sums


def double(model: nn.Module) -> nn.Module:
    return model.double()


# Noise


@pytest.mark.parametrize("size", [1, 2, 5])
def test_dropout_in_training_mode(size: int) -> None:
    model = nn.Sequential(
        nn.Linear(3, 8),
        nn.Dropout(0.4),
        nn.ReLU(),
        nn.Linear(8, 8),
        nn.Dropout(0.3),
        nn.Linear(8, 2),
    )
    check(double(model).train(), torch.randn(size, 3).double())


def test_dropout_between_recurrent_layers() -> None:
    """The fallback evaluates the layer again: the same units must be dropped."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(2, 3, num_layers=2, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0][:, -1]

    check(double(Model()).train(), torch.randn(3, 4, 2).double())


def test_dropout_inside_attention() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.3, batch_first=True)
    check(double(layer).train(), torch.randn(3, 3, 4).double())


def test_the_fallback_leaves_the_random_state_where_it_was() -> None:
    """What a user draws after the backward pass does not depend on packprop."""
    model = packprop.extend(nn.LSTM(2, 3, num_layers=2, dropout=0.5, batch_first=True).double())
    x = torch.randn(3, 4, 2).double()
    drawn = []
    for asked in ([], [extensions.BatchGrad()]):
        torch.manual_seed(1)
        loss = packprop.extend(nn.MSELoss())(model(x)[0], torch.zeros(3, 4, 3).double())
        if asked:
            with packprop.backpack(*asked):
                loss.backward()
        else:
            loss.backward()
        drawn.append(torch.rand(4))
    assert torch.equal(*drawn)


def test_noise_that_does_not_come_from_the_input() -> None:
    """``sigma * randn(N, d)``: made of a parameter and constants, yet each sample has its own."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape[0], 2, dtype=x.dtype)
        return x @ m.get_parameter("w") + torch.exp(m.get_parameter("s")) * noise

    check(double(Raw(forward, w=(3, 2), s=(2,))), torch.randn(4, 3).double())


def test_random_rectifier_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.RReLU(), nn.Linear(6, 2))
    check(double(model).train(), torch.randn(4, 3).double())


# Shapes that mislead: every axis as long as the batch


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: nn.Linear(4, 4), id="linear"),
        pytest.param(
            lambda: Apply(
                lambda m, x: m.b(m.a(x).tanh().transpose(1, 2)).transpose(1, 2),
                a=nn.Linear(4, 4),
                b=nn.Linear(4, 4),
            ),
            id="mixer",
        ),
        pytest.param(
            lambda: Apply(
                lambda m, x: m.b(m.a(x.transpose(0, 1)).tanh().cumsum(0)).transpose(0, 1),
                a=nn.Linear(4, 4),
                b=nn.Linear(4, 4),
            ),
            id="time-first",
        ),
        pytest.param(
            lambda: Raw(
                lambda m, x: torch.tanh(x.permute(2, 0, 1) @ m.w).permute(1, 2, 0) + m.b,
                w=(4, 4),
                b=(4, 4),
            ),
            id="permuted",
        ),
        pytest.param(lambda: nn.Conv1d(4, 4, 3, padding=1), id="convolution"),
        pytest.param(lambda: nn.LayerNorm((4, 4)), id="layer-norm"),
        pytest.param(lambda: Raw(lambda m, x: (m.w @ x.flatten(1).T).T, w=(4, 16)), id="weight-first"),
        pytest.param(
            lambda: Apply(lambda m, x: m.a(x.transpose(0, 1))[0].transpose(0, 1), a=nn.GRU(4, 4)),
            id="recurrent-time-first",
        ),
    ],
)
def test_every_axis_as_long_as_the_batch(model: Callable[[], nn.Module]) -> None:
    check(double(model()), torch.randn(4, 4, 4).double())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
def test_batch_sizes_that_divide_other_axes(size: int) -> None:
    model = Apply(
        lambda m, x: (
            m.b(m.a(x.reshape(-1, 2)).tanh().view(x.shape[0], 4, 6).transpose(0, 1)).mean(0) + m.c(x.mean(1))
        ),
        a=nn.Linear(2, 6),
        b=nn.Linear(6, 2),
        c=nn.Linear(2, 2),
    )
    check(double(model), torch.randn(size, 4, 2).double())


# What an earlier batch has shown does not bind the next


def test_signals_that_vanish_say_nothing_about_the_samples() -> None:
    """A head that starts at zero: the first pass has nothing to tell axes apart by."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.tanh(m.inner(x.transpose(0, 1)))
        return m.head(hidden.cumsum(0)).transpose(0, 1).mean(1)

    model = double(Apply(forward, inner=nn.Linear(3, 3), head=nn.Linear(3, 3)))
    nn.init.zeros_(model.head.weight)
    x = torch.randn(3, 3, 3).double()
    check(model, x)
    nn.init.normal_(model.head.weight)
    check(model, x)


def test_mixing_that_begins_later_is_noticed() -> None:
    """A gate that starts at zero hides a mean over the batch until it opens."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
            self.gate = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            return self.head(h + self.gate * h.mean(0))

    model = packprop.extend(double(Gated()))
    loss_function = packprop.extend(nn.MSELoss())
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    for value in (0.0, 1.0):
        with torch.no_grad():
            model.gate.fill_(value)
        loss = loss_function(model(x), y)
        with (
            pytest.raises(PackpropError, match="sample"),
            packprop.backpack(extensions.BatchGrad()),
        ):
            loss.backward()


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        hidden = torch.tanh(self.layer(x[order]))
        return self.head(hidden[order.argsort()])


def test_an_order_that_depends_on_the_data() -> None:
    """Rows of the inner layer belong to other samples in every batch."""
    model = double(Sorted())
    sorted_x = torch.tensor([[0.0, 1, 2], [1, -1, 3], [2, 0, 1], [3, 5, -2]]).double()
    for x in (sorted_x, sorted_x.flip(0), sorted_x[[2, 0, 3, 1]]):
        with right_or_refused("sample"):
            check(model, x)


def test_experts_that_see_some_rows() -> None:
    """Tokens of several samples, in numbers that depend on the data, through one layer."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(2, 2)
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            flat = x.reshape(-1, 2)
            weights = self.router(flat).softmax(-1)
            out = torch.zeros_like(flat)
            for k, expert in enumerate(self.experts):
                chosen = (weights.argmax(-1) == k).nonzero()[:, 0]
                value = expert(flat[chosen]) * weights[chosen, k, None]
                out = out.index_add(0, chosen, value)
            return out.view(x.shape)

    model = double(Experts())
    for seed in range(6):
        x = torch.randn(2, 2, 2, generator=torch.Generator().manual_seed(seed)).double()
        with right_or_refused("sample", "experts"):
            check(model, x)


def test_the_same_shapes_through_another_path() -> None:
    """Control flow that depends on the data: every pass is looked at by itself."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)) if x.sum() > 0 else x)

    model = double(Branching())
    for sign in (1.0, -1.0, 1.0):
        x = sign * torch.rand(3, 3).double()
        packprop.extend(model)
        target = torch.zeros(3, 3).double()
        for parameter in model.parameters():
            parameter.grad = None
            if hasattr(parameter, "grad_batch"):
                del parameter.grad_batch
        with packprop.backpack(extensions.BatchGrad()):
            packprop.extend(nn.MSELoss())(model(x), target).backward()
        for name, expected in rows_of(model, partial(model, x), target).items():
            parameter = model.get_parameter(name)
            if parameter.grad is None:
                assert not hasattr(parameter, "grad_batch")
            else:
                assert_near(parameter.grad_batch, expected, name)


def test_batch_sizes_that_change() -> None:
    model = double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    for size in (4, 2, 1, 7, 4):
        check(model, torch.randn(size, 3).double())


def test_losses_that_change() -> None:
    """The same graph and shapes, another loss function or none: nothing is carried over."""
    model = packprop.extend(double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))))
    x, labels = torch.randn(2, 3).double(), torch.tensor([0, 1])
    real = torch.rand(2, 2).double()
    for loss_function, target in (
        (nn.CrossEntropyLoss(), labels),
        (nn.MSELoss(), real),
        (nn.BCEWithLogitsLoss(), real),
        (F.mse_loss, real),
        (nn.CrossEntropyLoss(reduction="sum"), real),
        (nn.MSELoss(), real),
    ):
        recorded = isinstance(loss_function, nn.Module)
        if recorded:
            packprop.extend(loss_function)
        asked = [extensions.BatchGrad()] + [extensions.DiagGGNExact()] * recorded
        with packprop.backpack(*asked):
            loss_function(model(x), target).backward()
        whole = loss_function(model(x), target)
        gradients = torch.autograd.grad(whole, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert_near(parameter.grad_batch.sum(0), gradient, "rows")


# Samples that are mixed: an error, whatever the number of samples


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
    with pytest.raises(PackpropError) as caught, packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    assert "sample" in str(caught.value)
    assert "first" in str(caught.value)
    assert not any(hasattr(p, "grad_batch") for p in model.parameters())


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


# Other ways in


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


def test_a_gradient_penalty_is_right_or_refused() -> None:
    """The gradient inside the loss uses parameters where no torch function was seen."""
    model = packprop.extend(double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))))
    x = torch.randn(4, 3).double().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = (slope.norm(dim=1) - 1).square().mean() + out.mean()
    with pytest.raises(PackpropError) as caught, packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    assert "weight" in str(caught.value)
    assert not any(hasattr(p, "grad_batch") for p in model.parameters())


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
