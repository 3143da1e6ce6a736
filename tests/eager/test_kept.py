"""What is kept for the backward pass: in lower precision, on the CPU, or nothing but the inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from packprop.engine.eager import choices, eager_backward
from packprop.errors import PackpropError
from tests.eager.branches import WEIGHT, N, assert_same, gradients, kept, network, per_sample, per_sample_shared


def test_lower_precision_halves_what_is_kept() -> None:
    leaf, x = network(dtype=torch.float32)
    for chunks in (None, 3):
        value = eager_backward(per_sample, x, keep=torch.bfloat16, chunks=chunks)
        assert [t.dtype for t in kept(value)] == [torch.bfloat16]
        ours, plain = gradients(value.sum(), leaf), gradients(per_sample(x).sum(), leaf)
        assert ours[0].dtype == torch.float32
        assert_same(ours, plain, 0.02)


@pytest.mark.parametrize("chunks", [None, 3])
def test_a_gradient_that_a_lower_precision_cannot_hold(chunks: int | None) -> None:
    _, x = network(dtype=torch.float32)
    with pytest.raises(PackpropError, match="this precision ends there") as error:
        eager_backward(lambda x: 1e5 * x.sum(), x, keep=torch.float16, chunks=chunks)
    assert "torch.bfloat16" in error.value.instead


@pytest.mark.parametrize("chunks", [None, 3])
def test_what_is_infinite_stays_so_in_a_lower_precision(chunks: int | None) -> None:
    x = torch.tensor([4.0, 0.0, 1.0], requires_grad=True)
    eager_backward(lambda x: x.sqrt().sum(), x, keep=torch.bfloat16, chunks=chunks).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.25, torch.inf, 0.5]


def test_a_precision_without_infinity() -> None:
    x = torch.tensor([4.0, 1.0], requires_grad=True)
    eager_backward(lambda x: x.sqrt().sum(), x, keep=torch.float8_e4m3fn).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.25, 0.5]
    for factor in (1e3, torch.inf):
        with pytest.raises(PackpropError, match="larger than 448"):
            eager_backward(lambda x, factor: (factor * x).sum(), x, factor, keep=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("memory", "dtypes", "count"),
    [
        ("1MiB", [torch.float32] * 2, 2),  # x [6, 3] and WEIGHT [4, 3]: 120 bytes
        (120, [torch.float32] * 2, 2),
        (119, [torch.float32] * 2, 2),  # the input, to recompute from, and the parameter itself
        (72, [torch.float32] * 2, 2),
        (60, [torch.bfloat16] * 2, 2),
    ],
)
def test_memory_chooses(memory: int | str, dtypes: list[torch.dtype], count: int) -> None:
    weight = nn.Parameter(WEIGHT.detach().float())
    leaf, x = network(dtype=torch.float32)

    def fn(x: Tensor) -> Tensor:
        return (x @ weight.T).pow(2).sum()

    value = eager_backward(fn, x, memory=memory)
    recomputes = memory in (119, 72)
    assert [t.dtype for t in kept(value)] == dtypes
    assert (kept(value)[0].data_ptr() == x.data_ptr()) == recomputes
    tolerance = 0.02 if memory == 60 else 1e-6
    assert_same(gradients(value, leaf, weight), gradients(fn(x), leaf, weight), tolerance)


def test_memory_recomputes_where_only_that_is_right() -> None:
    leaf, x = network()
    alpha = torch.arange(N, dtype=torch.float64)
    value = eager_backward(per_sample_shared, x, memory="1GB")
    plain = per_sample_shared(x)
    assert_same(gradients(alpha @ value, leaf, WEIGHT), gradients(alpha @ plain, leaf, WEIGHT))


def test_complex_gradients_are_not_rounded_and_count_whole() -> None:
    z = torch.ones(10, dtype=torch.complex64, requires_grad=True)
    with pytest.raises(PackpropError, match="80 bytes"):
        eager_backward(lambda z: z.abs().sum(), z, memory=60)


def test_memory_that_is_too_small() -> None:
    _, x = network(dtype=torch.float32)
    with pytest.raises(PackpropError) as error:
        eager_backward(per_sample, x, memory=35)
    assert error.value.where == "memory=35 bytes"
    assert "36 bytes" in error.value.why
    assert "36 bytes" in error.value.instead


@pytest.mark.parametrize(
    ("text", "size"),
    [(7, 7), ("7", 7), ("7B", 7), ("2KiB", 2048), ("1.5 GB", 1_500_000_000), ("1MiB", 2**20)],
)
def test_bytes(text: int | str, size: int) -> None:
    assert choices.byte_count(text) == size
