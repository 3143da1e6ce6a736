"""`eager_backward` together with autocast, checkpoints, offloading, fake tensors and `torch.compile`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

from packprop.engine.eager import eager_backward
from tests.eager.branches import (
    KEEPS,
    WEIGHT,
    D,
    Layer,
    N,
    assert_same,
    gradients,
    needs_question,
    network,
    scalar,
)
from tests.selection import thorough


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_is_the_function(context: Callable[[], Any]) -> None:
    _, x = network()
    with context():
        for chunks in (None, 4):
            value = eager_backward(scalar, x, chunks=chunks)
            assert not value.requires_grad
            assert_same([value], [scalar(x).detach()])
    with torch.inference_mode():
        constant = torch.ones(N, D, dtype=torch.float64)
    value = eager_backward(lambda a, b: (a * b.sum()).sum(), x, constant)
    assert value.requires_grad


@pytest.mark.parametrize("keep", KEEPS)
def test_random_numbers_are_drawn_in_place(keep: str) -> None:
    def run(evaluate: Callable[..., Tensor]) -> list[Tensor]:
        leaf, x = network()
        torch.manual_seed(3)
        first = F.dropout(x)
        value = evaluate(lambda x: F.dropout(x, 0.4).pow(3).sum(), x)
        second = F.dropout(x)
        state = torch.get_rng_state()
        found = gradients(first.sum() + value * 2 + second.sum(), leaf)
        assert torch.equal(state, torch.get_rng_state())
        return [value, *found, torch.rand(3)]

    assert_same(run(functools.partial(eager_backward, keep=keep)), run(lambda fn, x: fn(x)))


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("chunks", [None, 3])
@pytest.mark.parametrize("inside", [False, True])
def test_autocast(keep: str, chunks: int | None, inside: bool) -> None:
    weight = nn.Parameter(WEIGHT.detach().float())

    def fn(x: Tensor) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return F.linear(x, weight).float().pow(2).sum()

    def run(evaluate: Callable[..., Tensor], cache: bool = True) -> list[Tensor]:
        leaf, x = network(dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            before = F.linear(x, weight)  # leaves a copy of the weight in autocast's memory
            value = evaluate(fn, x)
            after = F.linear(x, weight)
            loss = before.float().sum() + 8 * value + after.float().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        found = [value.detach(), leaf.grad, weight.grad]
        weight.grad = None
        return found

    seen: list[bool] = []
    ours = run(functools.partial(eager_backward, keep=keep, chunks=chunks))
    assert all(seen)
    # Without its memory of weights, autocast sums a weight's gradients in float32, as we do.
    plain = run(lambda fn, x: fn(x), cache=False)
    assert_same(ours, plain, 2e-2 if chunks else 1e-6)


def test_a_gradient_scaler() -> None:
    results = []
    for evaluate in (eager_backward, lambda fn, x: fn(x)):
        leaf, x = network()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD([leaf], lr=0.1)
        scaler.scale(x.sum() + 0.1 * evaluate(scalar, x)).backward()
        scaler.step(optimizer)
        results.append([leaf.detach()])
    assert_same(*results)


def train(
    evaluate: Callable[..., Tensor], around: Callable[..., Any] = lambda f, x: f(x)
) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    layers = [Layer(evaluate) for _ in range(3)]
    x, loss = network()[1], torch.zeros((), dtype=torch.float64)
    for layer in layers:
        x, penalty = around(layer, x)
        loss = loss + 0.7 * penalty
    (loss + x.sum()).backward()
    found = [p.grad for layer in layers for p in layer.parameters()]
    return [loss.detach(), *found], sum(layer.calls for layer in layers)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("keep", KEEPS)
def test_checkpoint_around(reentrant: bool, keep: str) -> None:
    around = functools.partial(checkpoint, use_reentrant=reentrant)
    evaluate = functools.partial(eager_backward, keep=keep)
    plain, _ = train(lambda fn, x: fn(x))
    checkpointed, calls = train(evaluate, around)
    assert_same(checkpointed, plain)
    # Once in the forward pass, once more in the backward pass, and not within the forward pass.
    if not needs_question.args[0]:
        assert calls == (9 if keep == "recompute" else 6)


def test_checkpoint_inside() -> None:
    inside = lambda fn, x: checkpoint(fn, x, use_reentrant=False)  # noqa: E731  # as users write it
    plain, _ = train(lambda fn, x: fn(x))
    ours, calls = train(lambda fn, x: eager_backward(lambda x: inside(fn, x), x))
    assert_same(ours, plain)
    assert calls == 6


def test_reentrant_checkpoint_inside_is_refused_by_pytorch() -> None:
    inside = lambda fn, x: checkpoint(fn, x, use_reentrant=True)  # noqa: E731  # as users write it
    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        train(lambda fn, x: eager_backward(lambda x: inside(fn, x), x))


@needs_question
def test_offloading_around_does_not_touch_the_branch() -> None:
    packed = []

    def run(evaluate: Callable[..., Tensor]) -> list[Tensor]:
        packed.clear()
        leaf, x = network()
        hooks = (lambda t: packed.append(t.shape) or t, lambda t: t)
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            value = evaluate(scalar, x)
        return gradients(value * 2, leaf, WEIGHT)

    plain = run(lambda fn, x: fn(x))
    assert len(packed) > 2
    assert_same(run(eager_backward), plain)
    assert packed == [(N, D), (4, 3)]  # the kept gradients alone


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("chunks", [None, 3])
def test_a_dry_run_with_fake_tensors(keep: str, chunks: int | None) -> None:
    with FakeTensorMode():
        weight = nn.Parameter(torch.empty(4, D))
        leaf = torch.empty(N, D, requires_grad=True)
        h = leaf * 2
        value = eager_backward(lambda x: (x @ weight.T).sum() * h.sum(), h, keep=keep, chunks=chunks)
        value.backward()
    assert type(leaf.grad) is FakeTensor
    assert weight.grad.shape == (4, D)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection() -> None:
    leaf, x = network()
    with torch.autograd.detect_anomaly(check_nan=True):
        value = eager_backward(scalar, x)
        assert_same(gradients(value, leaf), gradients(scalar(x), leaf))


def test_nesting() -> None:
    def outer(evaluate: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        def fn(x: Tensor) -> Tensor:
            y = x * WEIGHT[0]
            return evaluate(scalar, y) * y.sum() + evaluate(scalar, y.cos())

        return fn

    leaf, x = network()
    plain = gradients(2 * outer(lambda fn, x: fn(x))(x), leaf, WEIGHT)
    for keep in KEEPS:
        for inner in KEEPS:
            fn = outer(functools.partial(eager_backward, keep=inner))
            assert_same(gradients(2 * eager_backward(fn, x, keep=keep), leaf, WEIGHT), plain)


def test_as_a_decorator() -> None:
    @eager_backward
    def bare(x: Tensor, power: int = 2) -> Tensor:
        """Doc."""
        return x.pow(power).sum()

    @eager_backward(chunks=2, keep="recompute")
    def chosen(x: Tensor) -> Tensor:
        return x.pow(2).sum()

    class Model:
        weight = nn.Parameter(torch.ones(D, dtype=torch.float64))

        @eager_backward
        def method(self, x: Tensor) -> Tensor:
            return (x * self.weight).pow(2).sum()

    @eager_backward
    def nothing() -> Tensor:
        return WEIGHT.pow(2).sum()

    leaf, x = network()
    plain = gradients(x.pow(2).sum(), leaf)
    model = Model()
    for value in (bare(x), bare(x, power=2), chosen(x), model.method(x)):
        assert type(value.grad_fn).__name__ == "EagerBackward"
        assert_same(gradients(value, leaf), plain)
    assert (bare.__name__, bare.__doc__) == ("bare", "Doc.")
    wanted = gradients((x * model.weight).pow(2).sum(), model.weight)
    assert_same(gradients(model.method(x), model.weight), wanted)
    assert_same(gradients(nothing(), WEIGHT), [2 * WEIGHT.detach()])


@thorough
@pytest.mark.parametrize("keep", KEEPS)
def test_a_compiled_function(keep: str) -> None:
    leaf, x = network()
    held = leaf.cos()

    def fn(x: Tensor) -> Tensor:
        return (x @ WEIGHT.T).tanh().pow(2).sum() + (x * held).sum()

    compiled = torch.compile(fn, backend="aot_eager")
    for _ in range(2):
        value = eager_backward(compiled, x, keep=keep)
        assert_same(gradients(2 * value, leaf, WEIGHT), gradients(2 * fn(x), leaf, WEIGHT))


@thorough
@pytest.mark.filterwarnings("ignore:.*unsupported builtin|.*does not know how to trace")
def test_inside_a_compiled_model() -> None:
    def model(x: Tensor, evaluate: Callable[..., Tensor]) -> Tensor:
        x = x.sin()
        return x.sum() + 2 * evaluate(scalar, x * 2)

    leaf, x = network()
    compiled = torch.compile(lambda x: model(x, eager_backward), backend="aot_eager")
    plain = model(x, lambda fn, x: fn(x))
    assert_same(gradients(compiled(x), leaf, WEIGHT), gradients(plain, leaf, WEIGHT))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_beside_linear_cross_entropy(reduction: str) -> None:
    """PyTorch's own chunked head, where it exists, inside of a branch and beside it."""
    linear_cross_entropy = getattr(F, "linear_cross_entropy", None)
    if linear_cross_entropy is None:
        pytest.skip("this PyTorch has no F.linear_cross_entropy")
    leaf, x = network()
    target = torch.tensor([0, 3, 1, 1, 0, 2])
    plain = F.cross_entropy(F.linear(x, WEIGHT), target, reduction=reduction)
    fused = functools.partial(linear_cross_entropy, reduction=reduction)
    for options in (None, nn.LinearCrossEntropyOptions(batch_chunk_size=2)):
        for chunks in (None, 3):
            value = eager_backward(
                lambda x, y, options=options: fused(x, WEIGHT, y, options=options),
                x,
                target,
                chunks=chunks,
                reduction=reduction,
            )
            assert_same(gradients(2 * value, leaf, WEIGHT), gradients(2 * plain, leaf, WEIGHT))
