"""Computing in pieces changes no number."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packprop.engine.eager import eager_backward
from tests.eager.branches import WEIGHT, D, N, assert_same, gradients, kept, network


@pytest.mark.parametrize("chunks", [1, 2, 4, 5])
def test_a_mean_penalty_counts_each_piece_by_its_length(chunks: int) -> None:
    leaf, x = network()
    fn = lambda x: (x @ WEIGHT.T).pow(2).mean()  # noqa: E731  # as users write it
    value = eager_backward(fn, x, chunks=chunks, reduction="mean")
    assert_same([value], [fn(x)])
    assert_same(gradients(value, leaf, WEIGHT), gradients(fn(x), leaf, WEIGHT))


def head(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target, reduction="sum", ignore_index=-1)


@pytest.mark.parametrize("explicit", [False, True])
def test_a_vocabulary_in_pieces_with_targets_to_ignore(explicit: bool) -> None:
    leaf, x = network()
    target = torch.tensor([0, 3, -1, 1, -1, 2])
    plain = F.cross_entropy(F.linear(x, WEIGHT), target, ignore_index=-1)
    if explicit:
        value = eager_backward(head, x, WEIGHT, target, chunks=4)
    else:
        fn = lambda x, target: head(x, WEIGHT, target)  # noqa: E731  # as users write it
        value = eager_backward(fn, x, target, chunks=4)
    value = value / (target != -1).sum()
    assert_same([value], [plain])
    assert_same(gradients(value, leaf, WEIGHT), gradients(plain, leaf, WEIGHT))


def test_pairs_of_rows_with_one_side_whole() -> None:
    def pairs(rows: Tensor, every: Tensor) -> Tensor:
        return (-torch.cdist(rows, every).pow(2)).exp().sum()

    leaf, x = network()
    x = x + torch.rand_like(x)
    value = eager_backward(pairs, x, x, chunks=3, axes=(0, None))
    assert_same(gradients(value, leaf), gradients(pairs(x, x), leaf), 1e-9)


def test_positions_in_pieces() -> None:
    x = torch.randn(N, 10, D, dtype=torch.float64, requires_grad=True)
    target = torch.randint(4, (N, 10))
    alpha = torch.arange(N, dtype=torch.float64)

    def fn(x: Tensor, target: Tensor) -> Tensor:
        logits = (x * x.detach().exp()).transpose(1, 2)
        return F.cross_entropy(logits, target % D, reduction="none").sum(1)

    value = eager_backward(fn, x, target, chunks=3, axes=1)
    assert_same([value], [fn(x, target)])
    assert_same(gradients(alpha @ value, x), gradients(alpha @ fn(x, target), x))


def test_a_parameter_that_only_one_piece_reaches() -> None:
    leaf, x = network()
    fn = lambda x: x.pow(2).sum() if x[0, 0] < 0 else (x @ WEIGHT.T).sum()  # noqa: E731  # as users write it
    rows = [fn(x[n : n + 1]) for n in range(N)]
    plain = torch.stack(rows).sum()
    value = eager_backward(fn, x, chunks=N)
    assert_same(gradients(value, leaf, WEIGHT), gradients(plain, leaf, WEIGHT))


@pytest.mark.parametrize(("memory", "recomputes"), [("1MiB", False), (130, True)])
def test_a_budget_counts_what_every_piece_reaches(memory: int | str, recomputes: bool) -> None:
    leaf, x = network(dtype=torch.float32)
    experts = [nn.Parameter(torch.full((D,), 1.0 + n)) for n in range(N)]

    def fn(x: Tensor, which: Tensor) -> Tensor:
        return torch.stack([(row * experts[n]).sum().exp() for row, n in zip(x, which, strict=True)]).sum()

    value = eager_backward(
        fn, x, torch.arange(N), memory=memory, chunks=N
    )  # inputs: 120 bytes; experts: 12 each
    assert (value.grad_fn.record.recompute is not None) == recomputes
    assert_same(gradients(value, leaf, *experts), gradients(fn(x, torch.arange(N)), leaf, *experts), 1e-6)


def test_pieces_are_summed_in_single_precision() -> None:
    x = torch.full((512, 2), 1 + 2**-6, dtype=torch.bfloat16, requires_grad=True)
    w = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    value = eager_backward(lambda x: (x * w).sum(), x, chunks=512)
    value.backward()
    assert value.dtype == w.grad.dtype == torch.bfloat16
    assert value.item() == 1040.0
    assert w.grad.tolist() == [520.0, 520.0]


def test_gradients_are_kept_in_the_dtype_of_their_tensors() -> None:
    x = torch.ones(8, 2, dtype=torch.bfloat16, requires_grad=True)
    w = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    for chunks in (None, 4):
        for keep in ("exact", "cpu"):
            value = eager_backward(lambda x: (x * w).pow(2).sum(), x, chunks=chunks, keep=keep)
            assert [t.dtype for t in kept(value)] == [torch.bfloat16] * 2
            assert_same(gradients(value, x, w), [2 * torch.ones_like(x), 16 * torch.ones_like(w)])


@pytest.mark.parametrize("keep", ["exact", "recompute"])
def test_a_piece_whose_value_depends_on_no_input(keep: str) -> None:
    leaf, x = network()

    def fn(x: Tensor) -> Tensor:
        return sum((row.pow(2).sum() for row in x if row[0] > x0), torch.zeros((), dtype=x.dtype))

    x0 = x[:, 0].median()
    assert_same(gradients(eager_backward(fn, x, chunks=N, keep=keep), leaf), gradients(fn(x), leaf))


def test_no_samples_at_all() -> None:
    x = torch.zeros(0, D, requires_grad=True)
    for chunks in (None, 3):
        value = eager_backward(lambda x: x.pow(2).sum(), x, chunks=chunks)
        assert value.item() == 0
        assert gradients(value, x)[0].shape == (0, D)
        assert eager_backward(lambda x: x.pow(2).sum(1), x, chunks=chunks).shape == (0,)
