"""Tensors of the outer graph that the function reaches without being given them: found, or refused."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from packprop.engine.eager import eager_backward, reach
from packprop.errors import PackpropError
from tests.eager.branches import KEEPS, D, N, assert_same, gradients, needs_cuda, network
from tests.selection import thorough


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.parts = {"tensor": [tensor]}

    def penalty(self, x: Tensor) -> Tensor:
        return (x * self.parts["tensor"][0]).pow(2).sum()


class Attached(nn.Module):
    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D, dtype=torch.float64)
        self.activation = tensor

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.activation).pow(2).sum()


class ByGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return by_global(x)


class Called:
    def __call__(self, x: Tensor) -> Tensor:
        return product(x, GLOBAL)


def product(x: Tensor, other: Tensor) -> Tensor:
    return (x * other).pow(2).sum()


def by_global(x: Tensor) -> Tensor:
    return sum((x * h).pow(2).sum() for h in [GLOBAL])  # type: ignore[return-value]  # sum() may be 0


GLOBAL: Tensor


WAYS: dict[str, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
    "cell": lambda h: lambda x: product(x, h),
    "view of a cell": lambda h: lambda x: product(x[:, 0], h[1]),
    "container in a cell": lambda h: (lambda pair: lambda x: product(x, pair[1]["h"]))((0, {"h": h})),
    "function in a cell": lambda h: (lambda g: lambda x: g(x).sum())(lambda x: (x * h).pow(2)),
    "default": lambda h: lambda x, h=h: product(x, h),
    "keyword default": lambda h: lambda x, *, h=h: product(x, h),
    "called object": lambda h: Called(),
    "forward of a module": lambda h: ByGlobal(),
    "partial": lambda h: functools.partial(product, other=h),
    "method": lambda h: Holder(h).penalty,
    "module": Attached,
    "global": lambda h: by_global,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("keep", ["exact", "recompute"])
@pytest.mark.parametrize("chunks", [None, 3])
def test_tensors_of_the_outer_graph_are_found(way: str, keep: str, chunks: int | None) -> None:
    global GLOBAL
    leaf, x = network()
    source = torch.randn(D, dtype=torch.float64, requires_grad=True)
    GLOBAL = h = source.exp()
    fn = WAYS[way](h)
    value = eager_backward(fn, x, keep=keep, chunks=chunks)
    assert_same(gradients(3 * value, leaf, source), gradients(3 * fn(x), leaf, source))
    # The graph around is as whole as it was.
    assert_same(gradients(h.sum(), source), [h])


def test_a_tensor_of_an_object_that_is_an_argument() -> None:
    leaf, x = network()
    holder = Holder(leaf.exp())
    fn = lambda x, holder: holder.penalty(x)  # noqa: E731  # as users write it
    assert_same(gradients(eager_backward(fn, x, holder), leaf), gradients(fn(x, Holder(leaf.exp())), leaf))


def test_a_tensor_of_the_outer_graph_that_cannot_be_found_is_refused() -> None:
    _, x = network()
    h = x.exp()
    hidden = iter([h])
    with pytest.raises(PackpropError) as error:
        eager_backward(lambda t: (t * next(hidden)).sum(), x.detach())
    assert "ExpBackward0 made outside" in error.value.where
    assert "no name leads to it" in error.value.why
    assert "as an input" in error.value.instead
    assert_same(gradients(h.sum(), x), [h])


@thorough
def test_a_tensor_of_another_thread_is_told_apart() -> None:
    """Nodes are numbered per thread: here the number of `h` is that of a node of the branch."""
    leaf, x = network()
    h = leaf.exp()
    found: list[Any] = []

    def work() -> None:
        while reach.clock() < reach.number_of_node(h.grad_fn) - 4:
            pass
        x = torch.ones(N, D, dtype=torch.float64, requires_grad=True)
        x.sin()  # brings the count up to the number of h and past it while fn runs
        for _ in range(6):
            value = eager_backward(lambda x: (x.sin().cos().sin() * h).sum(), x)
            found.append(gradients(value, leaf, x))

    for _ in range(50):  # more nodes here than in the thread to come
        h = h * 1
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    x = torch.ones(N, D, dtype=torch.float64, requires_grad=True)
    plain = gradients((x.sin().cos().sin() * h).sum(), leaf, x)
    assert len(found) == 6
    for ours in found:
        assert_same(ours, plain)
    assert_same(gradients(h.sum(), leaf), [h])


def gradient_penalty(critic: nn.Module) -> Callable[[Tensor], Tensor]:
    """A gradient penalty: pulls the norm of a critic's gradient towards 1, so it differentiates by itself."""

    def penalty(x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).pow(2)

    return penalty


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("chunks", [None, 3])
def test_a_function_that_differentiates_in_turn(device: str, keep: str, chunks: int | None) -> None:
    leaf, x = (t.to(device) for t in network())
    x = leaf.detach().requires_grad_()
    critic = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 1)).to(device, torch.float64)
    scale = x.new_ones(())
    held = (scale.requires_grad_() * 2).exp()
    penalty = gradient_penalty(critic)
    fn = lambda x: (penalty(x) * held).sum()  # noqa: E731  # as users write it
    of = [x, *critic.parameters(), scale]
    value = eager_backward(fn, x, keep=keep, chunks=chunks)
    assert_same(gradients(3 * value, *of), gradients(3 * fn(x), *of))
    assert_same(gradients(held, scale), [2 * held.detach()])


def test_nodes_that_an_accelerator_made_in_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a gradient penalty makes some of its nodes in another thread."""
    plain_number = reach.number_of_node
    strange = ("TBackward0", "MmBackward0", "TanhBackwardBackward0")

    def number(node: Any) -> int:
        return 2**40 if node.name() in strange else plain_number(node)

    monkeypatch.setattr(reach, "number_of_node", number)
    monkeypatch.setattr(reach, "_has_threads", lambda device: True)
    x = network()[0]
    critic = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    held = scale.exp()
    penalty = gradient_penalty(critic)
    fn = lambda x: (penalty(x) * held).sum()  # noqa: E731  # as users write it
    of = [x, *critic.parameters(), scale]
    for keep in KEEPS:
        for chunks in (None, 3):
            value = eager_backward(fn, x, keep=keep, chunks=chunks)
            assert_same(gradients(3 * value, *of), gradients(3 * fn(x), *of))
    assert_same(gradients(held, scale), [held.detach()])
    monkeypatch.setattr(reach, "_has_threads", lambda device: False)
    with pytest.raises(PackpropError, match="no name leads to it"):
        eager_backward(fn, x)


def test_weights_made_inside_are_followed_to_their_parameters() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(D, 4, dtype=torch.float64))
    leaf, x = network()

    def fn(x: Tensor) -> Tensor:
        return layer(x).tanh().sum()

    of = (leaf, *layer.parameters())
    assert len(of) == 4
    assert_same(gradients(eager_backward(fn, x), *of), gradients(fn(x), *of))


def test_hooks_run_once_and_retained_gradients_are_not_disturbed() -> None:
    def run(evaluate: Callable[..., Tensor]) -> list[Any]:
        seen: list[str] = []
        leaf, x = network()
        w = nn.Parameter(torch.ones(D, dtype=torch.float64))
        h = leaf.cos()
        h.retain_grad()
        w.register_hook(lambda g: seen.append("w") or g * 0.5)
        w.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
        h.register_hook(lambda g: seen.append("h") or g * 3)
        x.register_hook(lambda g: seen.append("x") or g * 7)
        value = evaluate(lambda x: (x * h * w).pow(2).sum(), x)
        (2 * value).backward()
        return [sorted(seen), w.grad, h.grad, leaf.grad]

    plain = run(lambda fn, x: fn(x))
    assert plain[0] == ["accumulated", "h", "w", "x"]
    for keep in KEEPS:
        ours = run(functools.partial(eager_backward, keep=keep))
        assert ours[0] == plain[0]
        assert_same(ours[1:], plain[1:])


def test_a_sparse_gradient_stays_sparse() -> None:
    table = nn.Embedding(10, D, sparse=True, dtype=torch.float64)
    tokens = torch.tensor([1, 4, 4, 7])
    for chunks in (None, 2):
        value = eager_backward(lambda t: table(t).pow(3).sum(), tokens, chunks=chunks)
        (ours,) = torch.autograd.grad(2 * value, [table.weight])
        (plain,) = torch.autograd.grad(2 * table(tokens).pow(3).sum(), [table.weight])
        assert ours.is_sparse
        assert_same([ours.to_dense()], [plain.to_dense()])
