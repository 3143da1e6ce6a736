"""What repeats itself is run a few times only in a plan, and the peak is right all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.curvature import double_backward
from packprop.engine.graph import pull
from packprop.engine.memory import dry_run
from packprop.engine.memory.live import LiveBytes
from packprop.engine.tensors import repeated
from tests.selection import often, thorough


class Attention(nn.Module):
    """Positions that meet in a softmax: its Hessian is computed by columns of double backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.head = nn.Linear(4, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.softmax(self.scores(x), 1).square())
        return out


class Gated(nn.Module):
    """A parameter that enters twice: the diagonal needs double backward in the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.einsum("ni,oi,oi->no", x, self.weight, self.weight.exp()))


class Folded(nn.Module):
    """A function without a rule, in whose output no axis holds the samples alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.kron(x[:, 0], self.weight).view(len(x), 6))
        return out


@often(lambda make, asked: (make, asked) == (Attention, extensions.DiagHessian))
@pytest.mark.parametrize("make", [Attention, Gated])
@pytest.mark.parametrize("asked", [extensions.DiagHessian, extensions.BatchDiagHessian])
def test_columns_of_the_hessian_repeat_themselves(
    make: Any, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunk by chunk, three are enough, and say the same as all of them."""
    torch.manual_seed(0)
    model = make()
    batch = torch.randn(5, next(model.parameters()).shape[1]), torch.randint(3, (5,))
    monkeypatch.setattr(double_backward, "BATCHED_ENTRIES", 1)
    calls: list[int] = []
    derivatives_along = double_backward._derivatives_along

    def counted(*args: Any) -> Any:
        calls.append(1)
        return derivatives_along(*args)

    monkeypatch.setattr(double_backward, "_derivatives_along", counted)
    plan = packprop.plan(model, nn.CrossEntropyLoss(), batch, [asked()])
    planned = len(calls)
    calls.clear()
    monkeypatch.setattr(double_backward, "chunk_starts", lambda count, step: [*range(0, count, step)])
    whole = packprop.plan(model, nn.CrossEntropyLoss(), batch, [asked()])
    assert 0 < planned <= len(calls) / 2
    assert plan.peak == pytest.approx(whole.peak, rel=0.02)


def test_columns_one_by_one_repeat_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function without a batching rule is pulled back through for each column."""
    grad = torch.autograd.grad
    calls: list[int] = []

    def one_at_a_time(*args: Any, is_grads_batched: bool = False, **options: Any) -> Any:
        if is_grads_batched:
            raise RuntimeError("no batching rule")
        calls.append(1)
        return grad(*args, **options)

    monkeypatch.setattr(pull.torch.autograd, "grad", one_at_a_time)  # type: ignore[attr-defined]  # reached through a module that imports it
    torch.manual_seed(0)
    model = Attention()
    batch = torch.randn(5, 4), torch.randint(3, (5,))
    plan = packprop.plan(model, nn.CrossEntropyLoss(), batch, [extensions.DiagHessian()])
    planned = len(calls)
    calls.clear()
    monkeypatch.setattr(repeated, "chunk_starts", lambda count, step: [*range(0, count, step)])
    whole = packprop.plan(model, nn.CrossEntropyLoss(), batch, [extensions.DiagHessian()])
    assert 2 * planned < len(calls)
    assert plan.peak == pytest.approx(whole.peak, rel=0.02)


class Residual(nn.Module):
    """Two convolutions with a smooth function behind each, whose backward pass has no batching rule."""

    def __init__(self, head: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.head = nn.Linear(2 * head**2, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.gelu(self.first(x))
        h = nn.functional.gelu(self.second(h) + x)
        out: Tensor = self.head(h.flatten(1))
        return out


def planned_operations(
    model: nn.Module, batch: tuple[Tensor, Tensor], asked: Any, patch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """The peak that is planned, and how many operations the plan ran."""
    counts: list[LiveBytes] = []

    class Counted(dry_run.PeakRecorder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            counts.append(self.live)

    patch.setattr(dry_run, "PeakRecorder", Counted)
    plan = packprop.plan(model, nn.CrossEntropyLoss(), batch, [asked])
    return plan.peak, sum(len(live.history) for live in counts)


@thorough
@often(lambda asked: asked is extensions.DiagHessian)
@pytest.mark.parametrize("asked", [extensions.BatchDiagHessian, extensions.DiagHessian])
def test_a_plan_runs_as_many_operations_for_many_columns_as_for_few(
    asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vectorised pass calls functions without a batching rule for two columns, which stand for all."""
    torch.manual_seed(0)

    def planned(pixels: int) -> tuple[int, int]:
        batch = torch.randn(2, 2, pixels, pixels), torch.randint(3, (2,))
        return planned_operations(Residual(pixels), batch, asked(), monkeypatch)

    (_, few), (peak, many) = planned(4), planned(8)
    assert many <= 1.2 * few
    monkeypatch.setattr(repeated, "STANDING", 10**9)
    whole, all_of_them = planned(8)
    assert all_of_them > 1.5 * many
    assert peak == pytest.approx(whole, rel=0.001)


def test_a_plan_runs_few_samples_of_a_function_without_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node is called for all samples at once."""

    def planned(samples: int) -> tuple[int, int]:
        torch.manual_seed(0)
        batch = torch.randn(samples, 6), torch.randint(3, (samples,))
        return planned_operations(Folded(), batch, extensions.BatchDiagGGNExact(), monkeypatch)

    (_, few), (peak, many) = planned(4), planned(40)
    assert many <= few + 2 * 36  # memory is taken for each
    assert peak > 0
