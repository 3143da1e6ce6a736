"""Gradients that packprop sums itself reach ``.grad`` through the nodes of the leaves, and without a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop.engine.algebra import kernels
from packprop.engine.algebra.statistics import summed_grad, total_grad
from packprop.engine.passes import gradient
from packprop.engine.passes.gradient import hand_over
from packprop.extensions import BatchGrad, Variance
from packprop.types import GRADIENT, Extension, Row


def test_extensions_share_no_memory() -> None:
    """Two extensions may take one statistic: each has a result of its own, which may change in place."""

    class Again(BatchGrad):
        savefield = "grad_batch_again"

    model, loss = packprop.extend(nn.Linear(3, 2)), packprop.extend(nn.MSELoss())
    for _ in range(3):
        with packprop.backpack(BatchGrad(), Again()):
            loss(model(torch.randn(4, 3)), torch.zeros(4, 2)).backward()
        for p in model.parameters():
            known = p.grad_batch.clone()
            p.grad_batch.zero_()
            assert torch.equal(p.grad_batch_again, known)


def test_autograd_takes_the_memory_of_the_gradient() -> None:
    leaf = nn.Parameter(torch.zeros(3, 2))
    gradients = [(leaf, torch.arange(6.0).reshape(3, 2))]
    place = gradients[0][1].data_ptr()
    hand_over(gradients)
    assert leaf.grad is not None
    assert leaf.grad.data_ptr() == place
    assert not leaf.grad.requires_grad
    assert not gradients


def test_gradients_add_up_and_hooks_run() -> None:
    """A leaf may come twice, as the sum over samples and that of a term beside them."""
    leaf, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3, dtype=torch.float64))
    leaf.grad = torch.ones(2)
    seen: list[Any] = []
    leaf.register_hook(lambda gradient: gradient * 2)
    other.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    hand_over([(leaf, torch.ones(2)), (other, torch.ones(3, dtype=torch.float64)), (leaf, torch.ones(2))])
    assert torch.equal(leaf.grad, torch.full((2,), 5.0))
    assert len(seen) == 1
    assert torch.equal(seen[0], torch.ones(3, dtype=torch.float64))


class Total(Extension):
    """The gradient, computed as packprop's own parts compute it."""

    savefield = "total"
    rows = (Row(GRADIENT, total_grad), Row(GRADIENT, summed_grad))

    def finish(self, values: list[Any], samples: int) -> list[Tensor]:
        """Return both."""
        return values


@pytest.mark.parametrize("single", [False, True], ids=["together", "one by one"])
def test_results_share_no_memory_with_the_gradient(monkeypatch: pytest.MonkeyPatch, single: bool) -> None:
    """A step that clips or clears ``.grad`` in place leaves all results as they are, also in direct passes."""
    monkeypatch.setattr(gradient, "WORTH_SUMMING", 0)
    monkeypatch.setattr(kernels, "WORTH_A_CALL", 0 if single else 2**60)
    monkeypatch.setattr(kernels, "SHORT", 0)
    model = packprop.extend(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    x, y = torch.randn(6, 7, 4), torch.randn(6, 7, 3)
    for asked in ([Total(), BatchGrad()], [Total(), Variance()], [Total()]):
        for _ in range(4):
            model.zero_grad()
            with packprop.backpack(*asked):
                nn.functional.mse_loss(model(x), y).backward()
            for parameter in model.parameters():
                expected = parameter.grad.clone()
                parameter.grad.zero_()
                for total in parameter.total:
                    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("first", [0, 3], ids=["from the first pass", "in a direct pass"])
@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_on_several_leaves_runs_once(monkeypatch: pytest.MonkeyPatch, mode: Any, first: int) -> None:
    monkeypatch.setattr(gradient, "WORTH_SUMMING", 0)
    model = packprop.extend(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    x, y, seen = torch.randn(6, 7, 4), torch.randn(6, 7, 3), list[Any]()
    for step in range(6):
        if step == first:
            leaves = list(model.parameters())
            torch.autograd.graph.register_multi_grad_hook(leaves, lambda given: seen.append(given), mode=mode)
        with packprop.backpack(BatchGrad()):
            nn.functional.mse_loss(model(x), y).backward()
    assert len(seen) == 6 - first
    if mode == "all":
        assert all(each is not None for given in seen for each in given)


def test_a_monitor_of_a_step_that_clips() -> None:
    """The gradient of the monitor's own passes is not the user's, which the step changes in place."""
    norms = []
    for limit in (None, 1e-3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        x, y = torch.randn(32, 64, 64), torch.randn(32, 64, 64)
        monitor = packprop.Monitor(model, every=1, log=None)
        with monitor.step():
            nn.functional.mse_loss(model(x), y).backward()
            if limit is not None:
                nn.utils.clip_grad_norm_(model.parameters(), limit)
        norms.append(monitor.last["gradient_norm"])
    assert norms[0] == pytest.approx(norms[1])


def test_a_complex_leaf_and_a_disabled_graph() -> None:
    leaf = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with torch.no_grad():
        hand_over([(leaf, torch.ones(2, dtype=torch.complex64))])
    assert isinstance(leaf.grad, Tensor)
    assert torch.equal(leaf.grad, torch.ones(2, dtype=torch.complex64))
