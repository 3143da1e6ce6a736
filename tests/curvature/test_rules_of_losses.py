"""Rules of losses that a user registers: a root that is not that of the Hessian is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import PackpropError, extensions
from packprop.engine.functions.losses import description
from packprop.functions import Loss, Root

CLASSES = 3


class Quartic(nn.Module):
    """``sum (o - t)^4 / 12`` over its divisor, of which second derivatives are ``(o - t)^2``."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - targets) ** 4 / 12).sum() / len(outputs)


class Coupled(nn.Module):
    """Squares of sums over entries: they interact."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).sum(-1).square().sum() / 2


class Fused(torch.autograd.Function):
    """Squares whose backward pass is no function of its input, as of kernels in another language."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        ctx.residual = (outputs - targets).detach()
        return ctx.residual.square().sum() / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # of any arguments
        return gradient.detach() * ctx.residual, None


class FusedLoss(nn.Module):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return Fused.apply(outputs, targets)  # type: ignore[no-any-return]  # torch says Any


@dataclass
class Told:
    """What a rule says: a factor on the root, and the divisor as a multiple of the right one."""

    root: float = 1.0
    divisor: float = 1.0


Register = Callable[[type[nn.Module], Callable[..., Loss]], nn.Module]


@pytest.fixture
def register() -> Iterator[Register]:
    """Register a rule for one test, and return the extended loss."""
    kept = dict(description.LOSSES), dict(description.PROVEN)

    def add(kind: type[nn.Module], rule: Callable[..., Loss]) -> nn.Module:
        packprop.register_loss(kind)(rule)
        return packprop.extend(kind())

    yield add
    for table, before in zip((description.LOSSES, description.PROVEN), kept, strict=True):
        table.clear()
        table.update(before)


def quartic_rule(told: Told) -> Callable[..., Loss]:
    def rule(outputs: Tensor, targets: Tensor) -> Loss:
        residual = (outputs - targets).detach()

        def root(values: Tensor, scale: Tensor) -> Root:
            front = residual.reshape(values.shape).abs() * scale.sqrt()[..., None] * told.root
            return Root(1, lambda t, start, stop: front[None, :, t], lambda draws, generator: front[None])

        return Loss(class_axis=None, weight=1.0, divisor=told.divisor * len(outputs), root=root)

    return rule


def problem(shape: tuple[int, ...] = (5, 4)) -> tuple[nn.Module, Tensor, Tensor]:
    model = packprop.extend(nn.Linear(shape[-1], CLASSES).double())
    return model, torch.randn(shape).double(), torch.randn(*shape[:-1], CLASSES).double()


def diagonals(model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    with packprop.backpack(extensions.DiagGGNExact()):
        loss(model(x), y).backward()
    return [parameter.diag_ggn_exact for parameter in model.parameters()]  # type: ignore[misc]  # packprop gives parameters attributes


@pytest.mark.parametrize("shape", [(5, 4), (1, 4), (5, 2, 4)])
def test_a_right_root_is_taken(register: Register, shape: tuple[int, ...]) -> None:
    model, x, y = problem(shape)
    loss = register(Quartic, quartic_rule(Told()))
    found = diagonals(model, loss, x, y)
    del description.LOSSES[Quartic]
    torch.testing.assert_close(found, diagonals(model, loss, x, y))
    assert {case[0] for case in description.PROVEN[Quartic]} == {torch.Size((*shape[:-1], CLASSES))}


@pytest.mark.parametrize("told", [Told(root=2), Told(root=0), Told(divisor=2), Told(root=1.1)])
def test_a_wrong_root_is_refused_in_every_pass(register: Register, told: Told) -> None:
    model, x, y = problem()
    loss = register(Quartic, quartic_rule(told))
    for _ in range(2):
        with pytest.raises(PackpropError, match="is not the Hessian") as caught:
            diagonals(model, loss, x, y)
    assert "Quartic" in caught.value.where


def test_a_root_that_was_right_proves_no_other_divisor(register: Register) -> None:
    model, x, y = problem()
    told = Told()
    loss = register(Quartic, quartic_rule(told))
    diagonals(model, loss, x, y)
    told.divisor = 2.0
    with pytest.raises(PackpropError, match="is not the Hessian"):
        diagonals(model, loss, x, y)


class Weighted(nn.Module):
    """Squares times a number that the module holds, and one that it gets."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, outputs: Tensor, targets: Tensor, factor: float = 1.0) -> Tensor:
        return self.weight * factor * (outputs - targets).square().sum() / 2


@pytest.mark.parametrize("name", ["of another module", "of the module", "of the call"])
def test_a_root_that_was_right_proves_nothing_of_other_options(register: Register, name: str) -> None:
    def rule(outputs: Tensor, targets: Tensor, factor: float = 1.0) -> Loss:
        def root(values: Tensor, scale: Tensor) -> Root:
            front = scale.sqrt()[..., None].expand_as(values)
            return Root(1, lambda t, start, stop: front[None, :, t], lambda draws, generator: front[None])

        return Loss(class_axis=None, weight=1.0, divisor=1.0, root=root)

    model, x, y = problem()
    loss = register(Weighted, rule)
    diagonals(model, loss, x, y)
    options = {"factor": 2.0} if name == "of the call" else {}
    if name == "of the module":
        loss.weight = 2.0  # type: ignore[assignment]  # torch says a module or a tensor
    elif not options:
        loss = packprop.extend(Weighted(2.0))
    with pytest.raises(PackpropError, match="is not the Hessian"), packprop.backpack(extensions.DiagGGNExact()):
        loss(model(x), y, **options).backward()


@pytest.mark.parametrize("make", [extensions.DiagGGNMC, extensions.KFAC])
def test_draws_are_refused_with_their_root(register: Register, make: Callable[[], Any]) -> None:
    model, x, y = problem()
    loss = register(Quartic, quartic_rule(Told(root=2)))
    with pytest.raises(PackpropError, match="is not the Hessian"), packprop.backpack(make()):
        loss(model(x), y).backward()


def test_entries_that_interact(register: Register) -> None:
    """A rule that says that each entry has its own term has none of the entries between them."""

    def rule(outputs: Tensor, targets: Tensor) -> Loss:
        def root(values: Tensor, scale: Tensor) -> Root:
            ones = torch.ones_like(values)
            return Root(1, lambda t, start, stop: ones[None, :, t], lambda draws, generator: ones[None])

        return Loss(class_axis=None, weight=1.0, divisor=1.0, root=root)

    model, x, y = problem()
    with pytest.raises(PackpropError, match="is not the Hessian"):
        diagonals(model, register(Coupled, rule), x, y)


def test_saturated_losses_are_no_fault_of_a_rule(register: Register) -> None:
    """Second derivatives of float32 logits that are far apart are rounding alone."""

    class Odds(nn.Module):
        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return nn.functional.binary_cross_entropy_with_logits(outputs, targets, reduction="sum")

    def rule(outputs: Tensor, targets: Tensor) -> Loss:
        return Loss(None, 1.0, 1.0, packprop.engine.functions.losses.bernoulli_root)

    model, x, y = problem()
    loss = register(Odds, rule)
    for size in (1.0, 1e1, 1e2, 1e3):
        for dtype in (torch.float32, torch.bfloat16):
            diagonals(model.to(dtype), loss, (x * size).to(dtype), y.to(dtype).sigmoid())


def test_a_loss_with_its_own_backward_is_believed(register: Register) -> None:
    """Its second derivatives may be anything: only the rule knows them."""

    def rule(outputs: Tensor, targets: Tensor) -> Loss:
        def root(values: Tensor, scale: Tensor) -> Root:
            front = torch.ones_like(values) * scale.sqrt()[..., None]
            return Root(1, lambda t, start, stop: front[None, :, t], lambda draws, generator: front[None])

        return Loss(class_axis=None, weight=1.0, divisor=1.0, root=root)

    model, x, y = problem()
    (weight, bias) = diagonals(model, register(FusedLoss, rule), x, y)
    torch.testing.assert_close(bias, torch.full_like(bias, 5))
    torch.testing.assert_close(weight, x.square().sum(0).expand(CLASSES, 4))


@pytest.mark.parametrize("extended", [True, False])
def test_a_rule_for_a_loss_of_torch_is_taken(register: Register, extended: bool) -> None:
    """Its node alone would tell of another function."""
    told: list[torch.Size] = []
    own = description.LOSSES[nn.functional.cross_entropy]

    def rule(*args: Any, **kwargs: Any) -> Loss:
        told.append(args[0].shape)
        return own(*args, **kwargs)

    packprop.register_loss(nn.functional.cross_entropy)(rule)
    model, x, _ = problem()
    loss = packprop.extend(nn.CrossEntropyLoss()) if extended else nn.functional.cross_entropy
    with packprop.record():
        value = loss(model(x), torch.randint(CLASSES, (5,)))
    with packprop.backpack(extensions.DiagGGNExact()):
        value.backward()
    assert set(told) == {torch.Size([5, CLASSES])}


def test_a_rule_for_log_probabilities_is_none_for_logits(register: Register) -> None:
    """Cross entropy leaves the node of ``nll_loss``: a rule of that name is not asked about the logits."""

    def rule(outputs: Tensor, targets: Tensor, **options: Any) -> Loss:
        return Loss(class_axis=1, weight=3.0, divisor=1.0, root=None)

    model, x, _ = problem()
    y, loss = torch.randint(CLASSES, (5,)), packprop.extend(nn.CrossEntropyLoss())
    expected = diagonals(model, loss, x, y)
    packprop.register_loss(nn.functional.nll_loss)(rule)
    torch.testing.assert_close(diagonals(model, loss, x, y), expected)


class Hidden(nn.Module):
    """Calls a loss of torch where packprop does not see it."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        with packprop.disable():
            return nn.functional.mse_loss(outputs, targets, reduction="sum") / 2


def test_the_rule_of_a_module_is_asked_whatever_it_calls_unseen(register: Register) -> None:
    asked: list[torch.Size] = []

    def rule(outputs: Tensor, targets: Tensor) -> Loss:
        asked.append(outputs.shape)
        return Loss(class_axis=None, weight=1.0, divisor=1.0, root=None)

    model, x, y = problem()
    found = diagonals(model, register(Hidden, rule), x, y)
    assert asked
    torch.testing.assert_close(found[1], torch.full_like(found[1], 5))
