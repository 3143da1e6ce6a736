"""What one pass has shown holds for the next one of the same functions, shapes and options alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.functions import verdicts
from packprop.engine.graph import reading
from packprop.engine.samples import locating as located
from packprop.errors import PackpropError
from packprop.functions import Loss
from tests.cases.models.wrapping import Apply, Raw
from tests.graph.one_by_one import double
from tests.selection import one_in


def loss_of(f: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(f, y, reduction="none").sum(1)


def rows_shifted(h: Tensor, shift: int) -> Tensor:
    return torch.cat([h[place : place + 1] for place in [(n + shift) % len(h) for n in range(len(h))]])


BETWEEN: dict[str, Callable[[Tensor, int], Tensor]] = {
    "roll": lambda h, k: h + h.roll(k, 0),
    "softmax": lambda h, k: h.softmax(1 - k),
    "cumsum": lambda h, k: h.cumsum(1 - k),
    "norm": lambda h, k: h / h.norm(dim=1 - k, keepdim=True),
    "mean": lambda h, k: h - h.mean(1 - k, keepdim=True),
    "flip": lambda h, k: h + h.flip(1 - k),
    "slices": lambda h, k: h + rows_shifted(h, k),
    "equation": lambda h, k: h + torch.einsum(["ij,jk->ik", "ji,jk->ik"][k], h, h.detach()),
    "gather": lambda h, k: h + h.gather(1 - k, torch.tensor([[1, 0, 0]] * 3)),
    "index": lambda h, k: h + [h[:, [1, 0, 2]], h[[1, 0, 2]]][k],
    "sort": lambda h, k: h.sort(1 - k)[0],
    "assignment": lambda h, k: assigned(h, k),
    "numbers of equal hashes": lambda h, k: h[(None,) * 5].softmax([6, -2][k])[(0,) * 5],
    "numbers of equal hashes in an own function": lambda h, k: OwnSoftmax.apply(h, [-1, -2][k]),
}


class OwnSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int) -> Tensor:
        y = x.softmax(axis)
        ctx.save_for_backward(y)
        ctx.axis = axis
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (y,), (gradient,) = ctx.saved_tensors, gradients
        return y * (gradient - (gradient * y).sum(ctx.axis, keepdim=True)), None


def assigned(h: Tensor, place: int) -> Tensor:
    out = h.clone()
    out[:, 0] = h.roll(place, 0)[:, 0]
    return out


@one_in(2)
@pytest.mark.parametrize("name", BETWEEN)
def test_options_of_functions(name: str) -> None:
    """Functions of the same names and shapes along the samples' axis, in their order and out of it."""
    torch.manual_seed(0)
    model: Any = double(
        Apply(
            lambda m, x: m.head(BETWEEN[name](m.first(x).tanh(), m.option)),
            first=nn.Linear(3, 3),
            head=nn.Linear(3, 2),
        )
    )
    packprop.extend(model)
    loss = packprop.extend(nn.MSELoss())
    x, y = torch.randn(3, 3).double(), torch.randn(3, 2).double()
    for option in (0, 1, 0):
        model.option = option
        if option:
            with pytest.raises(PackpropError, match="mixed"), packprop.backpack(extensions.BatchGrad()):
                loss(model(x), y).backward()
        else:
            with packprop.backpack(extensions.BatchGrad()):
                loss(model(x), y).backward()


BEHIND: dict[str, Callable[[Tensor, int], Tensor]] = {
    "power": lambda each, k: each.sum() ** (1.0 + k),
    "norm": lambda each, k: each.norm(1.0 + k),
    "some": lambda each, k: each[torch.arange(4) <= 2 * k].sum().exp(),
    "pairs": lambda each, k: (each * each[torch.arange(4).roll(k)]).sum(),
    "selected": lambda each, k: (each * each.index_select(0, torch.arange(4).roll(k))).sum(),
    "gathered": lambda each, k: (each * each.gather(0, torch.arange(4).roll(k))).sum(),
}


@pytest.mark.parametrize("name", BEHIND)
def test_options_of_what_is_made_of_the_loss(name: str) -> None:
    torch.manual_seed(0)
    model = packprop.extend(nn.Linear(3, 2).double())
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()

    def value(option: int) -> Tensor:
        with packprop.record():
            return BEHIND[name](loss_of(model(x), y), option)

    for option in (0, 1, 0):
        root = value(option)
        if option:
            with pytest.raises(PackpropError, match="mix"), packprop.backpack(extensions.BatchGrad()):
                root.backward()
        else:
            with packprop.backpack(extensions.BatchGrad()):
                root.backward()


BY_VALUES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "exponent": lambda total, k: total ** torch.tensor(1.0 + k).double(),
    "exponent of zero": lambda total, k: total + total ** torch.tensor(2.0 * k).double(),
    "outside": lambda total, k: total + (total * 1e-3 + 2 - 1.6 * k).logit(eps=1e-3),
}


@pytest.mark.parametrize("name", BY_VALUES)
def test_functions_of_the_whole_loss_that_values_make_linear(name: str) -> None:
    """They may be linear now, and not in the next pass: they are refused in each."""
    torch.manual_seed(0)
    model = packprop.extend(nn.Linear(3, 2).double())
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    for k in (0.0, 1.0):
        root = BY_VALUES[name](loss_of(model(x), y).sum(), k)
        with pytest.raises(PackpropError, match="mix"), packprop.backpack(extensions.BatchGrad()):
            root.backward()


def test_an_exponent_that_is_a_tensor_in_the_loss_of_each_sample() -> None:
    torch.manual_seed(0)
    model = packprop.extend(nn.Linear(3, 2).double())
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    for k in (1.0, 1.0, 2.0):
        with packprop.backpack(extensions.BatchGrad()):
            (loss_of(model(x), y) ** torch.tensor(k).double()).sum().backward()
        each = [loss_of(model(x[n : n + 1]), y[n : n + 1]).sum() ** k for n in range(4)]
        expected = torch.stack([torch.autograd.grad(one, model.weight)[0] for one in each])
        torch.testing.assert_close(model.weight.grad_batch, expected)


def test_a_gate_that_hides_what_a_buffer_lets_through() -> None:
    """Values that keep samples apart today are looked at again tomorrow, parameters among them."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.gamma = nn.Linear(3, 2), nn.Parameter(torch.ones(()))
            self.register_buffer("open", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            out: Tensor = h + self.open * (self.gamma * h.mean(0).expand_as(h))
            return out

    model = packprop.extend(Gated().double())
    loss = packprop.extend(nn.MSELoss())
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    with packprop.backpack(extensions.BatchGrad()):
        loss(model(x), y).backward()
    with torch.no_grad():
        model.open.fill_(1.0)
        model.gamma.fill_(0.0)
    with pytest.raises(PackpropError, match="gamma"), packprop.backpack(extensions.BatchGrad()):
        loss(model(x), y).backward()


def test_products_of_two_losses() -> None:
    """Each is linear in itself, and their product curves: the Hessian has what one does to the other."""
    torch.manual_seed(0)
    model = packprop.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())
    x, y, z = torch.randn(3, 3).double(), torch.randn(3, 2).double(), torch.randn(3, 2).double()

    def value() -> Tensor:
        with packprop.record():
            out: Tensor = (loss_of(model(x), y) * loss_of(model(x), z)).sum()
            return out

    root = value()
    with packprop.backpack(extensions.DiagHessian()):
        root.backward()
    for name, parameter in model.named_parameters():
        (slope,) = torch.autograd.grad(value(), parameter, create_graph=True)
        rows = [
            torch.autograd.grad(each, parameter, retain_graph=True)[0].flatten() for each in slope.flatten()
        ]
        torch.testing.assert_close(parameter.diag_h.flatten(), torch.stack(rows).diagonal(), msg=name)
    root = value()
    with (
        pytest.raises(PackpropError, match="not linear in the loss"),
        packprop.backpack(extensions.DiagGGNExact()),
    ):
        root.backward()


class Maybe(torch.autograd.Function):
    """Subtracts the mean over samples if what it has kept says so; else it does not even multiply by zero."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, kept: Any) -> Tensor:
        ctx.kept = kept
        return h - h.mean(0) if kept in MIXES else h.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad - grad.mean(0) if ctx.kept in MIXES else grad.clone(), None


MIXES = (0.5, True, "mean", torch.float32, [1.0])
KEPT = {
    "float": (0.0, 0.5),
    "flag": (False, True),
    "text": ("", "mean"),
    "type": (torch.float64, torch.float32),
    "list": ([0.0], [1.0]),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_a_function_of_the_users_has_kept(name: str) -> None:
    torch.manual_seed(0)
    model: Any = packprop.extend(
        double(
            Apply(
                lambda m, x: m.head(Maybe.apply(m.first(x).tanh(), m.kept)),
                first=nn.Linear(3, 3),
                head=nn.Linear(3, 2),
            )
        )
    )
    loss = packprop.extend(nn.MSELoss())
    x, y = torch.randn(3, 3).double(), torch.randn(3, 2).double()
    usual, other = KEPT[name]
    for model.kept in (usual, usual, other):
        value = loss(model(x), y)
        if model.kept == other:
            with pytest.raises(PackpropError, match="mixed"), packprop.backpack(extensions.BatchGrad()):
                value.backward()
        else:
            with packprop.backpack(extensions.BatchGrad()):
                value.backward()


class Options:
    """Something that a function keeps, and that nothing on its node shows."""

    def __init__(self, axis: int) -> None:
        self.axis = axis


class Centred(torch.autograd.Function):
    """Subtracts the mean along an axis that an object holds, without one along the second axis."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, options: Options | None) -> Tensor:
        ctx.options = options
        return centred(h, options.axis if options else 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return centred(grad, ctx.options.axis if ctx.options else 1), None


def centred(h: Tensor, axis: int) -> Tensor:
    return h - h.mean(axis, keepdim=True)


def made_inside(axis: int) -> Any:
    """A class of its own for each axis, all of one name."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            return centred(h, axis)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return centred(grad, axis)

    return Own.apply


@torch.jit.script
def scripted(h: Tensor, axis: int) -> Tensor:
    return (h - h.mean(axis, keepdim=True)).tanh() * h


OPAQUE: dict[str, Callable[[Tensor, int], Any]] = {
    "objects": lambda h, axis: Centred.apply(h, Options(axis)),  # type: ignore[no-untyped-call]  # torch's own
    "class made inside": lambda h, axis: made_inside(axis)(h),
    "scripted": scripted,
}


@pytest.mark.parametrize("name", OPAQUE)
def test_functions_that_show_nothing(name: str) -> None:
    """What they compute is looked at in each pass: nothing that another pass could know decides on it."""
    torch.manual_seed(0)
    model: Any = packprop.extend(
        double(
            Apply(
                lambda m, x: m.head(OPAQUE[name](m.first(x).tanh(), m.axis)),
                first=nn.Linear(3, 3),
                head=nn.Linear(3, 2),
            )
        )
    )
    loss = packprop.extend(nn.MSELoss())
    x, y = torch.randn(3, 3).double(), torch.randn(3, 2).double()
    for axis in (1, 1, 1, 0):  # torch optimises a script in its second call
        model.axis = axis
        value = loss(model(x), y)
        if axis == 0:
            with pytest.raises(PackpropError, match="mixed"), packprop.backpack(extensions.BatchGrad()):
                value.backward()
            continue
        with packprop.backpack(extensions.BatchGrad()):
            value.backward()


@pytest.mark.parametrize("gated", [False, True], ids=["separate", "by values"])
@pytest.mark.parametrize("name", OPAQUE)
def test_functions_that_show_nothing_are_looked_at_less_and_less(
    name: str, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is kept of such a pass, so that only the random numbers are worth their time in each one."""
    looks: list[int] = []
    look = located.dependence
    monkeypatch.setattr(located, "dependence", lambda *given: looks.append(passes) or look(*given))
    model: Any = double(
        Apply(
            lambda m, x: m.head(OPAQUE[name](m.first(x), 1) + (m.gate * m.first(x).mean(0) if gated else 0.0)),
            first=nn.Linear(3, 3),
            head=nn.Linear(3, 2),
        )
    )
    model.register_buffer("gate", torch.zeros((), dtype=torch.float64))
    packprop.extend(model)
    x, y = torch.randn(3, 3).double(), torch.randn(3, 2).double()
    passes = 0
    while passes < 10:
        passes += 1
        with packprop.backpack(extensions.BatchGrad()):
            nn.functional.mse_loss(model(x), y).backward()
    assert set(looks) <= ({1, 2, 3, 4, 5, 6, 8} if name == "scripted" else {1, 2, 4, 8})


@pytest.mark.parametrize("name", OPAQUE)
def test_a_closed_gate_beside_functions_that_show_nothing(name: str) -> None:
    """A trainable gate of zero is refused there as anywhere: its own gradient is made of other samples."""
    model: Any = double(
        Apply(
            lambda m, x: m.head(OPAQUE[name](m.first(x), 1) + m.gate * m.first(x).roll(1, 0)),
            first=nn.Linear(3, 3),
            head=nn.Linear(3, 2),
        )
    )
    model.gate = nn.Parameter(torch.zeros((), dtype=torch.float64))
    packprop.extend(model)
    for _ in range(3):
        value = nn.functional.mse_loss(model(torch.randn(3, 3).double()), torch.zeros(3, 2).double())
        with (
            pytest.raises(PackpropError, match="present values of 'gate' hide"),
            packprop.backpack(extensions.BatchGrad()),
        ):
            value.backward()


def test_a_function_that_begins_to_keep_an_object() -> None:
    """A pass whose functions show nothing learns nothing from one of theirs with as many numbers and texts."""
    model: Any = double(
        Apply(
            lambda m, x: m.head(Centred.apply(m.first(x).tanh(), m.option)),  # type: ignore[no-untyped-call]  # torch's own
            first=nn.Linear(3, 3),
            head=nn.Linear(3, 2),
        )
    )
    packprop.extend(model)
    x, y = torch.randn(3, 3).double(), torch.randn(3, 2).double()
    for model.option in (None, Options(1)):
        with packprop.backpack(extensions.BatchGrad()):
            nn.functional.mse_loss(model(x), y).backward()
    model.option = Options(0)
    with pytest.raises(PackpropError, match="mixed"), packprop.backpack(extensions.BatchGrad()):
        nn.functional.mse_loss(model(x), y).backward()


def test_a_gate_along_another_axis() -> None:
    """Passes along the features say nothing about those along the samples that a closed gate hides."""
    torch.manual_seed(0)
    model: Any = packprop.extend(
        double(
            Apply(
                lambda m, x: m.head(m.first(x) + m.gate * m.first(x).roll(2, m.axis)),
                first=nn.Linear(8, 8),
                head=nn.Linear(8, 3),
            )
        )
    )
    model.gate = nn.Parameter(torch.ones((), dtype=torch.float64))
    loss = packprop.extend(nn.MSELoss())
    x, y = torch.randn(4, 8).double(), torch.randn(4, 3).double()
    model.axis = 1
    with packprop.backpack(extensions.BatchGrad()):
        loss(model(x), y).backward()
    model.axis = 0
    model.gate.data.zero_()
    with pytest.raises(PackpropError, match="mixed"), packprop.backpack(extensions.BatchGrad()):
        loss(model(x), y).backward()


def squares(outputs: Tensor, targets: Tensor, axis: int = 0) -> Tensor:
    return (outputs - targets).square().sum()


class Squares(nn.Module):
    def forward(self, outputs: Tensor, targets: Tensor, axis: int = 0) -> Tensor:
        return squares(outputs, targets)


seen_squares = torch.overrides.wrap_torch_function(lambda outputs, targets, axis=0: (outputs, targets))(squares)


@pytest.mark.parametrize("make", [Squares, lambda: seen_squares], ids=["module", "function"])
def test_an_axis_of_samples_that_an_option_of_a_loss_says(make: Callable[[], Any]) -> None:
    """The rule says it, and nothing on the graph does."""
    loss: Any = make()
    packprop.register_loss(type(loss) if isinstance(loss, nn.Module) else loss)(
        lambda outputs, targets, axis=0: Loss(None, 1.0, 1.0, None, sample_axis=axis)
    )
    loss = packprop.extend(loss) if isinstance(loss, nn.Module) else loss
    model: Any = packprop.extend(double(Raw(lambda m, x: (x * m.weight).tanh(), weight=())))
    x, y = torch.randn(3, 3).double(), torch.randn(3, 3).double()
    for axis in (0, 0, 0, 1, 1):
        with packprop.record():
            value = loss(model(x), y, axis=axis)
        with packprop.backpack(extensions.BatchGrad()):
            value.backward()
        alone = [squares(model(x.select(axis, n)), y.select(axis, n)) for n in range(3)]
        expected = torch.stack([torch.autograd.grad(each, model.weight)[0] for each in alone])
        torch.testing.assert_close(model.weight.grad_batch, expected)


def test_groups_that_few_samples_form_at_another_shape() -> None:
    """Groups of one in the first pass, and of two behind a closed gate in the second."""
    torch.manual_seed(0)

    def grouped(m: Any, x: Tensor) -> Tensor:
        h = m.first(x).tanh().T.reshape(3, m.size, -1)
        return m.head((h + m.gate * h.sum(1, keepdim=True)).reshape(3, -1).T)  # type: ignore[no-any-return]  # a module

    model: Any = double(Apply(grouped, first=nn.Linear(3, 3), head=nn.Linear(3, 2)))
    model.register_buffer("gate", torch.zeros(()).double())
    loss = packprop.extend(nn.MSELoss())
    packprop.extend(model)

    def run(samples: int, size: int, gate: float) -> None:
        model.size = size
        model.gate.fill_(gate)
        with packprop.backpack(extensions.BatchGrad()):
            loss(model(torch.randn(samples, 3).double()), torch.randn(samples, 2).double()).backward()

    run(5, 1, 1.0)
    run(4, 2, 0.0)
    with pytest.raises(PackpropError, match="mixed"):
        run(4, 2, 1.0)


class Masked(nn.Module):
    """A weight that is made of a mask, in which its rows meet; or data, as far as the graph shows."""

    def __init__(self, mask: Tensor, axis: int) -> None:
        super().__init__()
        self.weight, self.axis = nn.Parameter(torch.randn(4).double()), axis
        self.__dict__["mask"] = mask

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.mask, x) if self.axis == 0 else (x, self.mask)
        h = first * self.weight
        return (second * (h * h.sum(0).tanh()).sum(self.axis)).sum(1 - self.axis)


def test_what_one_model_makes_of_parameters_another_one_makes_of_data() -> None:
    torch.manual_seed(0)
    loss = packprop.extend(nn.MSELoss())
    for axis in (0, 1):
        value = loss(
            packprop.extend(Masked(torch.randn(4, 4).double(), axis))(torch.randn(4, 4).double()),
            torch.ones(4).double(),
        )
        if axis == 0:
            with packprop.backpack(extensions.BatchGrad()):
                value.backward()
        else:
            with pytest.raises(PackpropError, match="mixed"), packprop.backpack(extensions.BatchGrad()):
                value.backward()


@pytest.mark.parametrize("behind", [False, True], ids=["input", "behind the input"])
def test_a_masked_weight_of_another_model(behind: bool) -> None:
    """Its graph has the nodes and shapes of one where the input takes the place of the mask."""
    mask, y = torch.rand(4, 3).double(), torch.zeros(4, 3).double()
    masked = double(Apply(lambda m, x: x @ (mask * m.weight)))
    gated: Any = double(Apply(lambda m, x: m.matrix @ ((x.relu() if behind else x) * m.weight)))
    gated.register_buffer("matrix", torch.diag(torch.rand(4) + 1).double())
    x = torch.randn(4, 3).double()
    for model, given in ((masked, torch.randn(4, 4).double()), (gated, x)):
        model.weight = nn.Parameter(torch.randn(4, 3).double())
        packprop.extend(model)
        with packprop.backpack(extensions.BatchGrad()):
            nn.functional.mse_loss(model(given), y).backward()
    rows = 2 / 12 * gated(x) * gated.matrix.diagonal()[:, None] * (x.relu() if behind else x)
    torch.testing.assert_close(gated.weight.grad_batch.sum(1), rows.detach())


def test_verdicts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose graph has another length in each pass does not fill the memory."""
    monkeypatch.setattr(verdicts, "MANY", 4)
    mask = torch.rand(4, 3).double()

    def repeated(m: Any, x: Tensor) -> Tensor:
        h = x @ (mask * m.weight)
        for _ in range(m.length):
            h = h.tanh()
        return h

    model: Any = double(Raw(repeated, weight=(4, 3)))
    packprop.extend(model)
    for length in range(1, 10):
        model.length = length
        with packprop.backpack(extensions.BatchGrad()):
            nn.functional.mse_loss(model(torch.randn(4, 4).double()), torch.zeros(4, 3).double()).backward()
        assert 0 < len(reading._PARAMETRIC[model]) <= 4
