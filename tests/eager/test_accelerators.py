"""`eager_backward` on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from packprop.engine.eager import eager_backward
from tests.eager.branches import KEEPS, assert_same, gradients, kept, needs_cuda


@needs_cuda
@pytest.mark.parametrize("keep", [*KEEPS, torch.bfloat16])
@pytest.mark.parametrize("chunks", [None, 4])
def test_on_a_gpu(keep: Any, chunks: int | None) -> None:
    def run(evaluate: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        leaf = torch.randn(64, 32, device="cuda", requires_grad=True)
        weight = nn.Parameter(torch.ones(16, 32, device="cuda"))
        x = leaf * 2
        with torch.autocast("cuda", torch.bfloat16):
            value = evaluate(lambda x: (x @ weight.T).float().tanh().pow(2).sum(), x)
        x.zero_() if keep != "recompute" else None
        (4 * value).backward()  # a power of two, which commutes with rounding
        return [value.detach(), leaf.grad, weight.grad]

    ours = run(functools.partial(eager_backward, keep=keep, chunks=chunks))
    assert_same(ours, run(lambda fn, x: fn(x.clone())), 0.05 if chunks or keep not in KEEPS else 1e-5)


@needs_cuda
def test_gradients_wait_in_pinned_memory() -> None:
    leaf = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    for chunks in (None, 4):
        for choice in ({"keep": "cpu"}, {"memory": "1MiB"}):
            x = leaf * 2
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            value = eager_backward(lambda x: x.cos().sum(1), x, chunks=chunks, **choice)
            assert [(t.device.type, t.is_pinned()) for t in kept(value)] == [("cpu", True)]
            assert torch.cuda.memory_allocated() - before < 2**16
            (plain,) = gradients(x.cos().sum(), leaf)
            assert_same(gradients(value.sum(), leaf), [plain])


@needs_cuda
@pytest.mark.parametrize("keep", KEEPS)
def test_random_numbers_of_a_gpu(keep: str) -> None:
    def run(evaluate: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(3)
        leaf = torch.ones(64, 32, device="cuda", requires_grad=True)
        value = evaluate(lambda x: F.dropout(x, 0.4).pow(3).sum(), leaf * 2)
        after = torch.rand(3, device="cuda")
        return [value, *gradients(value, leaf), after, torch.rand(3, device="cuda")]

    assert_same(run(functools.partial(eager_backward, keep=keep)), run(lambda fn, x: fn(x)), 1e-5)


@needs_cuda
@pytest.mark.parametrize("keep", KEEPS)
def test_checkpoint_around_on_a_gpu_where_backward_has_a_thread_of_its_own(keep: str) -> None:
    def run(evaluate: Callable[..., Tensor], around: Callable[..., Tensor]) -> list[Tensor]:
        leaf = torch.full((8, 4), 0.3, device="cuda", requires_grad=True)
        loss = torch.zeros((), device="cuda")
        for _ in range(30):
            h = leaf.exp()  # from outside of what is checkpointed, found by name
            loss = loss + around(lambda x, h=h: evaluate(lambda x: (x.sin() * h).sum(), x), leaf * 2)
        loss.backward()
        return [loss.detach(), leaf.grad]

    plain = run(lambda fn, x: fn(x), lambda fn, x: fn(x))
    evaluate = functools.partial(eager_backward, keep=keep)
    assert_same(run(evaluate, functools.partial(checkpoint, use_reentrant=False)), plain, 1e-5)


@needs_cuda
def test_the_peak_on_a_gpu() -> None:
    def peak(evaluate: Callable[..., Tensor]) -> int:
        leaf = torch.randn(4096, 64, device="cuda", requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss, x = torch.zeros((), device="cuda"), leaf
        for _ in range(8):
            x = x.tanh()
            loss = loss + evaluate(lambda x: torch.exp(-(x @ x.T)).tanh().mean(), x)
        loss.backward()
        return torch.cuda.max_memory_allocated() - before

    assert peak(eager_backward) < 0.4 * peak(lambda fn, x: fn(x))
