"""`eager_backward` against plain autograd: values, gradients, memory, and every refusal."""

from __future__ import annotations

import functools
import gc
import os
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

from packprop.eager import choices, eager_backward, pieces, reach
from packprop.errors import BadInput, PackpropError, PackpropWarning
from packprop.recording import saved_hooks

WEIGHT = nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3))
N, D = 6, 3
KEEPS = ("exact", "cpu", "recompute")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_question = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="this PyTorch cannot be asked whether there are hooks on saved tensors",
)


def scalar(x: Tensor) -> Tensor:
    return (x @ WEIGHT.T).tanh().pow(2).sum()


def per_sample(x: Tensor) -> Tensor:
    return x.pow(3).sum(1) + x.sin().prod(1)


def per_sample_shared(x: Tensor) -> Tensor:
    return (x @ WEIGHT.T).tanh().pow(2).sum(1)


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """A leaf and an activation computed from it, as of an outer network."""
    generator = torch.Generator().manual_seed(seed)
    leaf = torch.randn(N, D, generator=generator, dtype=dtype).requires_grad_()
    return leaf, leaf.sin() * 2 + leaf


def gradients(value: Tensor, *of: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(value, of, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, of, strict=True)]


def assert_same(got: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-12) -> None:
    for ours, plain in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("chunks", [None, 1, 4, 99])
@pytest.mark.parametrize("factor", [1.0, -3.5])
def test_scalar_equals_plain(keep: str, chunks: int | None, factor: float) -> None:
    leaf, x = network()
    plain = scalar(x)
    value = eager_backward(scalar, x, chunks=chunks, keep=keep)
    assert_same([value], [plain])
    assert_same(gradients(factor * value, leaf, WEIGHT), gradients(factor * plain, leaf, WEIGHT))


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(("chunks", "axes"), [(None, 0), (4, 0), (2, 1), (3, -1)])
def test_a_value_per_sample_is_scaled_per_sample(keep: str, chunks: int | None, axes: int) -> None:
    def separable(x: Tensor) -> Tensor:
        return x.pow(3).sum(1)

    leaf, x = network()
    alpha = torch.linspace(-2, 3, N, dtype=torch.float64)
    plain = separable(x)
    value = eager_backward(separable, x, chunks=chunks, axes=axes, keep=keep)
    assert_same([value], [plain])
    assert_same(gradients(alpha @ value, leaf), gradients(alpha @ plain, leaf))


def test_the_scale_is_decided_at_the_end_of_the_network() -> None:
    leaf, x = network()
    plain_x = x
    penalties = []
    for _ in range(3):
        penalties.append(eager_backward(per_sample, x))
        x = x.tanh() @ torch.eye(D, dtype=torch.float64) * 1.3
    scale = x.pow(2).sum(1)  # part of the graph, known only now
    loss = x.sum() + sum((scale * penalty).sum() for penalty in penalties)
    x, plain = plain_x, []
    for _ in range(3):
        plain.append(per_sample(x))
        x = x.tanh() @ torch.eye(D, dtype=torch.float64) * 1.3
    scale = x.pow(2).sum(1)
    wanted = x.sum() + sum((scale * penalty).sum() for penalty in plain)
    assert_same(gradients(loss, leaf), gradients(wanted, leaf))


@pytest.mark.parametrize("chunks", [None, 4])
def test_weights_given_in_advance_are_right_for_parameters(chunks: int | None) -> None:
    leaf, x = network()
    weights = torch.linspace(-1, 2, N, dtype=torch.float64, requires_grad=True)
    value = eager_backward(per_sample_shared, x, weights=weights, chunks=chunks)
    plain = (weights * per_sample_shared(x)).sum()
    of = (leaf, WEIGHT, weights)
    assert_same([value], [plain])
    assert_same(gradients(5 * value, *of), gradients(5 * plain, *of))


@pytest.mark.parametrize("chunks", [None, 4])
def test_recomputation_scales_shared_tensors_per_sample(chunks: int | None) -> None:
    leaf, x = network()
    alpha = torch.linspace(-1, 2, N, dtype=torch.float64)
    value = eager_backward(per_sample_shared, x, keep="recompute", chunks=chunks)
    plain = per_sample_shared(x)
    assert_same(gradients(alpha @ value, leaf, WEIGHT), gradients(alpha @ plain, leaf, WEIGHT))


def test_pytrees_constants_and_integers() -> None:
    def fn(pair: tuple[Tensor, dict[str, Any]], index: Tensor, *, power: int, extra: Any) -> Tensor:
        a, named = pair
        return (a.pow(power) * named["b"][0])[index].sum() + extra["c"].sum() + len(named["name"])

    leaf, x = network()
    b = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    c = torch.randn(2, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([0, 2, 2])
    arguments = ((x, {"b": [b], "name": "four"}), index)
    named = {"power": 3, "extra": {"c": c}}
    for keep in KEEPS:
        value = eager_backward(fn, keep=keep)(*arguments, **named)
        plain = fn(*arguments, **named)
        assert_same([value], [plain])
        assert_same(gradients(2 * value, leaf, b, c), gradients(2 * plain, leaf, b, c))


def test_inputs_that_need_no_gradient() -> None:
    target = torch.randn(N, D, dtype=torch.float64)
    leaf, x = network()
    value = eager_backward(F.mse_loss, x, target)
    assert_same(gradients(value, leaf), gradients(F.mse_loss(x, target), leaf))
    assert not eager_backward(F.mse_loss, target, target + 1).requires_grad
    parameters_only = eager_backward(scalar, target)
    assert_same(gradients(parameters_only, WEIGHT), gradients(scalar(target), WEIGHT))


def test_one_tensor_passed_twice_and_also_reached() -> None:
    leaf, x = network()
    fn = lambda a, b: (a * b * x.cos()).sum()  # noqa: E731
    assert_same(gradients(eager_backward(fn, x, x), leaf), gradients(fn(x, x), leaf))
    layer = lambda w: (w * WEIGHT.exp()).sum()  # noqa: E731
    assert_same(gradients(eager_backward(layer, WEIGHT), WEIGHT), gradients(layer(WEIGHT), WEIGHT))


def test_an_input_or_a_leaf_returned_as_it_is() -> None:
    leaf = torch.tensor(2.0, requires_grad=True)
    assert_same(gradients(3 * eager_backward(lambda t: t, leaf), leaf), [torch.tensor(3.0)])
    value = eager_backward(lambda t: leaf, torch.ones(1))
    assert_same(gradients(value, leaf), [torch.tensor(1.0)])
    activation = leaf * 5
    value = eager_backward(lambda t: activation, torch.ones(1))
    assert_same(gradients(value, leaf), [torch.tensor(5.0)])


def test_complex_inputs() -> None:
    leaf = torch.randn(N, D, dtype=torch.complex128, requires_grad=True)
    for fn in (lambda z: z.abs().pow(3).sum(), lambda z: (z * z.conj()).real.sum(1)):
        plain = fn(leaf)
        alpha = torch.ones_like(plain) * 3
        value = eager_backward(fn, leaf, keep=torch.float32)
        assert_same(gradients((alpha * value).sum(), leaf), gradients((alpha * plain).sum(), leaf))


@pytest.mark.parametrize("keep", ["exact", "recompute"])
def test_gradcheck(keep: str) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return eager_backward(lambda x: (x @ w).tanh().pow(2).sum(), x, keep=keep)

    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(fn, (x, w))
    if keep == "recompute":
        assert torch.autograd.gradgradcheck(fn, (x, w))


# ------------------------------------------------------------------- what is reached by closure


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


def product(x: Tensor, other: Tensor) -> Tensor:
    return (x * other).pow(2).sum()


def by_global(x: Tensor) -> Tensor:
    return sum((x * h).pow(2).sum() for h in [GLOBAL])  # type: ignore[return-value]


GLOBAL: Tensor


WAYS: dict[str, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
    "cell": lambda h: lambda x: product(x, h),
    "view of a cell": lambda h: lambda x: product(x[:, 0], h[1]),
    "container in a cell": lambda h: (lambda pair: lambda x: product(x, pair[1]["h"]))((0, {"h": h})),
    "function in a cell": lambda h: (lambda g: lambda x: g(x).sum())(lambda x: (x * h).pow(2)),
    "default": lambda h: lambda x, h=h: product(x, h),
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


def test_a_tensor_of_another_thread_is_told_apart() -> None:
    """Nodes are numbered per thread: here the number of `h` is that of a node of the branch."""
    leaf, x = network()
    h = leaf.exp()
    found: list[Any] = []

    def work() -> None:
        while reach.clock() < reach._number(h.grad_fn) - 4:
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
    """Pulls the norm of a critic's gradient towards 1: a function that differentiates in turn."""

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
    fn = lambda x: (penalty(x) * held).sum()  # noqa: E731
    of = [x, *critic.parameters(), scale]
    value = eager_backward(fn, x, keep=keep, chunks=chunks)
    assert_same(gradients(3 * value, *of), gradients(3 * fn(x), *of))
    assert_same(gradients(held, scale), [2 * held.detach()])


def test_nodes_that_an_accelerator_made_in_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a gradient penalty makes some of its nodes in another thread."""
    plain_number = reach._number
    strange = ("TBackward0", "MmBackward0", "TanhBackwardBackward0")

    def number(node: Any) -> int:
        return 2**40 if node.name() in strange else plain_number(node)

    monkeypatch.setattr(reach, "_number", number)
    monkeypatch.setattr(reach, "_has_threads", lambda device: True)
    x = network()[0]
    critic = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    held = scale.exp()
    penalty = gradient_penalty(critic)
    fn = lambda x: (penalty(x) * held).sum()  # noqa: E731
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


# --------------------------------------------------------------------------------------- chunks


@pytest.mark.parametrize("chunks", [1, 2, 4, 5])
def test_a_mean_penalty_counts_each_piece_by_its_length(chunks: int) -> None:
    leaf, x = network()
    fn = lambda x: (x @ WEIGHT.T).pow(2).mean()  # noqa: E731
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
        fn = lambda x, target: head(x, WEIGHT, target)  # noqa: E731
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
    fn = lambda x: x.pow(2).sum() if x[0, 0] < 0 else (x @ WEIGHT.T).sum()  # noqa: E731
    rows = [fn(x[n : n + 1]) for n in range(N)]
    plain = torch.stack(rows).sum()
    value = eager_backward(fn, x, chunks=N)
    assert_same(gradients(value, leaf, WEIGHT), gradients(plain, leaf, WEIGHT))


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


def test_no_samples_at_all() -> None:
    x = torch.zeros(0, D, requires_grad=True)
    for chunks in (None, 3):
        value = eager_backward(lambda x: x.pow(2).sum(), x, chunks=chunks)
        assert value.item() == 0
        assert gradients(value, x)[0].shape == (0, D)
        assert eager_backward(lambda x: x.pow(2).sum(1), x, chunks=chunks).shape == (0,)


# -------------------------------------------------------------------------------- what is kept


def kept(value: Tensor) -> tuple[Tensor, ...]:
    return value.grad_fn.saved_tensors


def test_lower_precision_halves_what_is_kept() -> None:
    leaf, x = network(dtype=torch.float32)
    for chunks in (None, 3):
        value = eager_backward(per_sample, x, keep=torch.bfloat16, chunks=chunks)
        assert [t.dtype for t in kept(value)] == [torch.bfloat16]
        ours, plain = gradients(value.sum(), leaf), gradients(per_sample(x).sum(), leaf)
        assert ours[0].dtype == torch.float32
        assert_same(ours, plain, 0.02)


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


# --------------------------------------------------------------------------------------- memory


class Witness(torch.autograd.Function):
    """Multiplies by 2 and notes when what it saved is gone."""

    saved: ClassVar[list[weakref.ref]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scratch = x.clone()
        ctx.save_for_backward(scratch)
        Witness.saved.append(weakref.ref(scratch.untyped_storage()))
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


@pytest.fixture
def no_collector() -> Any:
    """Whatever is freed is freed by reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def storages() -> int:
    return sum(1 for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter))


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("chunks", [None, 3])
def test_the_branch_is_freed_at_once(keep: str, chunks: int | None) -> None:
    _, x = network()
    alive: list[int] = []

    def fn(x: Tensor) -> Tensor:
        alive.append(sum(ref() is not None for ref in intermediate))
        y = (x @ WEIGHT.T).exp()
        intermediate.append(weakref.ref(y))
        return Witness.apply(y).pow(2).sum()

    intermediate: list[weakref.ref] = []
    Witness.saved.clear()
    value = eager_backward(fn, x, keep=keep, chunks=chunks)
    assert alive == [0] * (chunks or 1)
    assert [ref() for ref in intermediate] == [None] * (chunks or 1)
    value.backward()
    assert [ref() for ref in intermediate] == [None] * len(intermediate)


@pytest.mark.usefixtures("no_collector")
def test_the_input_is_freed_too() -> None:
    leaf, _ = network()
    x = leaf + 1  # an addition saves nothing
    alive = weakref.ref(x)
    value = eager_backward(per_sample, x)
    assert [tuple(t.shape) for t in kept(value)] == [(N, D)]
    del x
    assert alive() is None
    value.sum().backward()
    assert_same([leaf.grad], gradients(per_sample(leaf + 1).sum(), leaf))


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("keep", KEEPS)
def test_many_steps_leave_nothing_behind(keep: str) -> None:
    h = torch.ones(D, dtype=torch.float64, requires_grad=True)

    def step() -> None:
        _, x = network()
        held = h * 2
        value = eager_backward(lambda t: (t * held * WEIGHT[0]).pow(2).sum(), x, keep=keep)
        (x.sum() + 3 * value).backward()

    step()
    before = storages()
    for _ in range(20):
        step()
    assert storages() == before
    WEIGHT.grad = None


def test_a_gradient_that_is_a_part_of_more_is_copied_out() -> None:
    _, x = network()
    value = eager_backward(lambda x: torch.cat([x.detach().expand(9, N, D).reshape(-1, D), x]).pow(2).sum(), x)
    assert kept(value)[0].untyped_storage().nbytes() == N * D * 8
    value = eager_backward(lambda x: x.sum(), x)  # one number, expanded
    assert kept(value)[0].untyped_storage().nbytes() == 8


def test_the_value_does_not_hold_on_to_more_than_itself() -> None:
    _, x = network()
    value = eager_backward(lambda x: x.pow(2)[:, 1], x)
    assert value.untyped_storage().nbytes() == N * 8
    value = eager_backward(lambda x: x[:, 1], x)
    with torch.no_grad():
        before = value.clone()
        x.zero_()
    assert_same([value], [before])


# ------------------------------------------------------------------------------- backward passes


def test_an_input_may_be_changed_in_place_afterwards() -> None:
    leaf, _ = network()
    x = leaf + 1
    value = eager_backward(per_sample, x)
    x.zero_()
    assert_same(gradients(value.sum(), leaf), gradients(per_sample(leaf + 1).sum(), leaf))


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("chunks", [None, 3])
def test_several_backward_passes(keep: str, chunks: int | None) -> None:
    leaf = network()[0].detach().requires_grad_()
    value = eager_backward(scalar, leaf, keep=keep, chunks=chunks)
    (plain,) = gradients(scalar(leaf), leaf)
    for times in (1, 2, 3):
        value.backward(retain_graph=times < 3, inputs=[leaf])
        assert_same([leaf.grad], [times * plain])
    with pytest.raises(PackpropError) as error:
        value.backward()
    assert error.value.where == "a second backward pass through the value"
    assert "released the kept gradient" in error.value.why
    assert "retain_graph=True" in error.value.instead


def test_two_values_of_one_call_share_the_kept_gradient() -> None:
    leaf, x = network()
    value = eager_backward(scalar, x, chunks=2)
    plain = scalar(x)
    assert_same(gradients(value * 3 + value.exp(), leaf), gradients(plain * 3 + plain.exp(), leaf))


def test_backward_inputs() -> None:
    leaf, x = network()
    value = eager_backward(scalar, x)
    WEIGHT.grad = None
    value.backward(inputs=[leaf], retain_graph=True)
    assert WEIGHT.grad is None
    assert_same([leaf.grad], gradients(scalar(x), leaf))


def test_create_graph_by_recomputation() -> None:
    for chunks in (None, 3):
        leaf, x = network()
        results = []
        for value in (eager_backward(scalar, x, keep="recompute", chunks=chunks), scalar(x)):
            first = torch.autograd.grad(value.pow(2), [leaf, WEIGHT], create_graph=True)
            second = sum(gradient.pow(2).sum() for gradient in first)
            results.append([*first, *gradients(second, leaf, WEIGHT)])
        assert_same(*results)


def test_create_graph_of_kept_numbers_is_refused() -> None:
    leaf, x = network()
    value = eager_backward(scalar, x)
    with pytest.raises(PackpropError) as error:
        torch.autograd.grad(value, leaf, create_graph=True)
    assert "create_graph=True" in error.value.where
    assert "keep='recompute'" in error.value.instead


@pytest.mark.parametrize("keep", ["exact", "recompute"])
def test_a_hook_changes_the_gradient_on_its_way(keep: str) -> None:
    def clip(gradient: Tensor) -> Tensor:
        norm = gradient.norm(dim=1, keepdim=True)
        return gradient / norm.clamp(min=0.5) * 0.5

    leaf, x = network()
    alpha = torch.linspace(0, 2, N, dtype=torch.float64)
    value = eager_backward(per_sample, x, hook=clip, keep=keep)
    (unclipped,) = gradients(alpha @ per_sample(x), x)
    (plain,) = torch.autograd.grad(x, leaf, clip(unclipped), retain_graph=True)
    assert_same(gradients(alpha @ value, leaf), [plain])


def test_a_hook_sees_inputs_only_and_may_leave_them() -> None:
    leaf, x = network()
    seen = []
    value = eager_backward(
        lambda a, n, b: (a * b).sum() + scalar(a), x, 3, leaf, hook=lambda *g: seen.append(g)
    )
    plain = gradients((x * leaf).sum() + scalar(x), leaf, WEIGHT)
    assert_same(gradients(value, leaf, WEIGHT), plain)
    assert [len(g) for g in seen] == [2]
    value = eager_backward(lambda a, b: (a * b).sum(), x, leaf, hook=lambda a, b: (a * 0, b * 2))
    assert_same(gradients(value, leaf), [2 * x])


# ---------------------------------------------------------------------------------- surroundings


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


class Layer(nn.Module):
    """A layer that adds a penalty on what it computes."""

    def __init__(self, evaluate: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D, dtype=torch.float64)
        self.critic = nn.Linear(D, 2, dtype=torch.float64)
        self.evaluate = evaluate
        self.calls = 0

    def penalty(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.dropout(self.critic(x), 0.3).exp().sum()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear(x).tanh()
        return x, self.evaluate(self.penalty, x)


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
    inside = lambda fn, x: checkpoint(fn, x, use_reentrant=False)  # noqa: E731
    plain, _ = train(lambda fn, x: fn(x))
    ours, calls = train(lambda fn, x: eager_backward(lambda x: inside(fn, x), x))
    assert_same(ours, plain)
    assert calls == 6


def test_reentrant_checkpoint_inside_is_refused_by_pytorch() -> None:
    inside = lambda fn, x: checkpoint(fn, x, use_reentrant=True)  # noqa: E731
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


# ----------------------------------------------------------------------------------- refusals


def freed_input() -> Tensor:
    x = torch.ones(N, D, requires_grad=True)
    x.untyped_storage().resize_(0)
    return x


def changes_constant(x: Tensor, y: Tensor) -> Tensor:
    y.add_(1)
    return (x * y).sum()


X = torch.ones(N, D, requires_grad=True)
BAD_INPUT: dict[str, tuple[Callable[[], Any], str, str, str]] = {
    "another shape": (
        lambda: eager_backward(lambda x: x.pow(2), X),
        "<lambda>",
        "returned the shape [6, 3]; inputs with samples: [6, 3]",
        "one value for each entry of axis 0",
    ),
    "too few values": (
        lambda: eager_backward(lambda x: x.pow(2).sum(0), X),
        "<lambda>",
        "returned the shape [3]",
        "return a scalar",
    ),
    "a whole input counted as samples": (
        lambda: eager_backward(lambda x: x.pow(2).sum(1), X, axes=[None]),
        "<lambda>",
        "inputs with samples: none",
        "return a scalar",
    ),
    "integers": (
        lambda: eager_backward(lambda x: x.argmax(), X),
        "<lambda>",
        "torch.int64, through which no gradient flows",
        "real floating point",
    ),
    "complex": (
        lambda: eager_backward(lambda x: (x * 1j).sum(), X),
        "<lambda>",
        "torch.complex64",
        "real floating point",
    ),
    "detached": (
        lambda: eager_backward(lambda x: x.detach().sum(), X),
        "<lambda>",
        "it returned a detached value",
        "without detach",
    ),
    "several values": (
        lambda: eager_backward(lambda x: (x.sum(), x.mean()), X),
        "<lambda>",
        "it returned 2 values, not one tensor",
        "return one tensor",
    ),
    "no tensor": (
        lambda: eager_backward(lambda x: x.sum().item(), X),
        "<lambda>",
        "it returned a float, not one tensor",
        "return one tensor",
    ),
    "changes its input": (
        lambda: eager_backward(lambda x: x.mul_(2).sum(), X),
        "<lambda>",
        "changed an input in place",
        "clone the input first",
    ),
    "changes a view of its input": (
        lambda: eager_backward(lambda x: x[0].mul_(2).sum(), X),
        "<lambda>",
        "changed an input in place",
        "clone the input first",
    ),
    "changes an input that needs no gradient": (
        lambda: eager_backward(changes_constant, X, torch.ones(N, D)),
        "changes_constant",
        "changed an input in place",
        "clone the input first",
    ),
    "an input that was freed": (
        lambda: eager_backward(lambda x: x.sum(), freed_input()),
        "an input of shape [6, 3]",
        "its memory was freed",
        "before it is freed",
    ),
    "mixed samples": (
        lambda: eager_backward(lambda x: (x - x.mean(0)).pow(3).sum(1), network()[1], check=True),
        "<lambda>",
        "values of other samples depend on sample",
        "the sum over samples",
    ),
    "a neighbour's sample": (
        lambda: eager_backward(
            lambda x: x.pow(2).sum(1) * (torch.arange(N) != 5) + x[0].sum() * (torch.arange(N) == 5),
            X,
            check=True,
        ),
        "<lambda>",
        "values of other samples depend on sample 0 of input 0",
        "keep='recompute'",
    ),
    "a mean in pieces": (
        lambda: eager_backward(lambda x: x.pow(2).mean(), X, chunks=3, check=True),
        "chunks=3 with <lambda>",
        "its first two pieces give 2.0 apart, 1.0 together",
        "reduction='mean'",
    ),
    "values per sample as a mean": (
        lambda: eager_backward(lambda x: x.sum(1), X, chunks=3, reduction="mean"),
        "reduction='mean' with <lambda>",
        "joined, not averaged",
        "leave reduction out",
    ),
    "inputs of several sizes": (
        lambda: eager_backward(lambda x, w: (x @ w).sum(), X, torch.ones(D, 2), chunks=2),
        "axes=0",
        "are [3, 6], not one number",
        "None for those that are passed whole",
    ),
    "an axis that an input lacks": (
        lambda: eager_backward(lambda x, y: x.sum(), X, torch.ones(N), chunks=2, axes=1),
        "axes: 1",
        "an input of shape [6] has no such axis",
        "one entry per input",
    ),
    "nothing to cut": (
        lambda: eager_backward(scalar, 3, chunks=2),
        "axes=0",
        "sizes along the axis to cut are []",
        "one entry per input",
    ),
    "too few axes": (
        lambda: eager_backward(lambda x, y: x.sum(), X, X, axes=[0]),
        "axes=[0]",
        "there are 2 inputs",
        "one entry per input",
    ),
    "samples in doubt": (
        lambda: eager_backward(lambda x, y: x.sum(1), X, torch.ones(D, N), chunks=2, axes=[0, 1]),
        "axes=[0, 1]",
        "in doubt which axis",
        "transpose",
    ),
    "too many weights": (
        lambda: eager_backward(lambda x: x.sum(1), X, weights=torch.ones(7)),
        "weights",
        "[7] weights for values of shape [6]",
        "one weight per sample",
    ),
    "weights that go on after the last piece": (
        lambda: eager_backward(lambda x: x.sum(1), X, weights=torch.ones(7), chunks=2),
        "weights",
        "7 for 6 samples",
        "one weight per sample",
    ),
    "weights for a scalar": (
        lambda: eager_backward(lambda x: x.sum(), X, weights=torch.ones(N)),
        "<lambda>",
        "it returned the shape []",
        "one value for each entry",
    ),
    "weights that are none": (
        lambda: eager_backward(lambda x: x.sum(1), X, weights=torch.ones(N, dtype=torch.int64)),
        "weights",
        "one weight per sample",
        "floating point",
    ),
    "chunks": (
        lambda: eager_backward(scalar, X, chunks=0),
        "chunks=0",
        "positive integer",
        "chunks=4",
    ),
    "reduction": (
        lambda: eager_backward(scalar, X, reduction="none"),
        "reduction='none'",
        "added or averaged",
        "'sum' or 'mean'",
    ),
    "keep": (
        lambda: eager_backward(keep="disk"),
        "keep='disk'",
        "no such choice",
        "'exact', 'cpu', 'recompute'",
    ),
    "keep as integers": (
        lambda: eager_backward(keep=torch.int8),
        "keep=torch.int8",
        "no such choice",
        "torch.bfloat16",
    ),
    "memory": (
        lambda: eager_backward(memory="much"),
        "memory='much'",
        "no number of bytes",
        "memory='64MiB'",
    ),
    "keep and memory": (
        lambda: eager_backward(memory="1GB", keep="cpu"),
        "keep='cpu', memory='1GB'",
        "both say what is kept",
        "give one",
    ),
    "no function": (
        lambda: eager_backward(X),
        "fn",
        "a Tensor cannot be called",
        "pass a function",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(case: str) -> None:
    call, where, why, instead = BAD_INPUT[case]
    with pytest.raises(BadInput) as error:
        call()
    assert "eager_backward" in error.value.asked
    assert where in error.value.where
    assert why in error.value.why
    assert instead in error.value.instead


def test_an_error_of_the_function_is_left_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2") as error:
        eager_backward(lambda x: (x @ x).sum(), X)
    assert not isinstance(error.value, PackpropError)
    with pytest.raises(ZeroDivisionError):
        eager_backward(lambda x: x.sum() / (1 // 0), X)


def test_a_shared_tensor_cannot_be_scaled_per_sample() -> None:
    layer = nn.Linear(D, 2, bias=False)
    for call, name in (
        (lambda: eager_backward(lambda x: layer(x).sum(1), X), "layer.weight of shape [2, 3]"),
        (lambda: eager_backward(lambda x, w: (x @ w).sum(1), X, layer.weight.T), "shape [3, 2]"),
    ):
        with pytest.raises(PackpropError) as error:
            call()
        assert name in error.value.where
        assert "only the sum over samples is kept" in error.value.why
        for way in ("weights=", "keep='recompute'", "return the sum"):
            assert way in error.value.instead


def test_independent_samples_pass_the_check() -> None:
    leaf, x = network()
    target = torch.arange(N)
    fn = lambda x, y: x.pow(3).sum(1) * y  # noqa: E731
    value = eager_backward(fn, x, target, check=True, chunks=3)
    assert_same(gradients(value.sum(), leaf), gradients(fn(x, target).sum(), leaf))
    mean = eager_backward(lambda x: x.pow(2).mean(), x, check=True, chunks=3, reduction="mean")
    assert_same([mean], [x.pow(2).mean()])
    with pytest.warns(PackpropWarning, match="draws random numbers"):
        eager_backward(lambda x: F.dropout(x).sum(), x, check=True, chunks=3)


def test_an_input_to_recompute_from_that_was_changed_or_freed() -> None:
    x = network()[0].detach().requires_grad_()
    value = eager_backward(scalar, x, keep="recompute")
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(PackpropError) as error:
        value.backward()
    assert error.value.where == "the backward pass through the value"
    assert "changed in place after the call" in error.value.why
    assert "change a clone" in error.value.instead
    value = eager_backward(scalar, x, keep="recompute")
    x.untyped_storage().resize_(0)
    with pytest.raises(PackpropError) as error:
        value.backward()
    assert "shape [6, 3]" in error.value.where
    assert "freed after the call" in error.value.why


def test_a_function_that_reaches_other_tensors_when_recomputed() -> None:
    _, x = network()
    reach_for = [WEIGHT[0].detach().requires_grad_(), WEIGHT[1].detach().requires_grad_()]
    value = eager_backward(lambda x: (x * reach_for.pop()).sum(), x, keep="recompute")
    with pytest.raises(PackpropError, match="reaches other tensors by closure"):
        value.backward()


# ---------------------------------------------------------------------------- what PyTorch is like


def test_what_eager_backward_relies_on_in_private() -> None:
    """Each line is a private part of PyTorch; `packprop.eager` says at its use what it is for."""
    leaf = torch.ones(2, requires_grad=True)
    first, second = leaf * 2, leaf * 3
    assert reach.clock() < reach.clock()  # Node._sequence_nr
    assert reach._number(first.grad_fn) < reach._number(second.grad_fn) < reach.clock()
    assert first.grad_fn.next_functions[0][0].variable is leaf
    assert type(first.grad_fn.next_functions[0][0]) is reach._ACCUMULATE_GRAD
    before = pieces.version(leaf)  # Tensor._version, shared by what detach() returns
    with torch.no_grad():
        leaf.detach().add_(1)
    assert pieces.version(leaf) == before + 1
    calls: list[int] = []
    leaf.register_hook(lambda g: calls.append(1))
    with reach.undisturbed([leaf]):  # Tensor._backward_hooks
        torch.autograd.grad((leaf * 2).sum(), leaf)
    assert calls == []
    torch.autograd.grad((leaf * 2).sum(), leaf)
    assert calls == [1]
    assert pieces.put_together(*map(list, pieces_of({"a": (leaf, 1)})))[0] == {"a": (leaf, 1)}
    if needs_question.args[0]:
        return
    assert saved_hooks.hooks_in_force() is None  # _top_saved_tensors_default_hooks
    with torch.autograd.graph.save_on_cpu():
        assert saved_hooks.hooks_in_force() is not None


def pieces_of(argument: Any) -> tuple[list[Any], list[Any]]:
    leaves, spec = pieces.take_apart(argument)
    return leaves, [spec]


def test_the_last_backward_pass_is_known_to_be_the_last() -> None:
    from packprop.recording.marks import graph_is_kept

    seen: list[bool] = []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            seen.append(graph_is_kept())
            return g

    value = Ask.apply(torch.ones((), requires_grad=True))
    value.backward(retain_graph=True)
    value.backward()
    assert seen == [True, False]


def test_the_node_is_recognisable() -> None:
    value = eager_backward(scalar, network()[1])
    assert type(value.grad_fn).__name__ == value.grad_fn.name() == "EagerBackward"
    leaves = {id(getattr(node, "variable", None)) for node, _ in value.grad_fn.next_functions}
    assert id(WEIGHT) in leaves


# -------------------------------------------------------------------------------- accelerators


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
        (3 * value).backward()
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


# --------------------------------------------------------------------------- several processes


class Sharded(nn.Module):
    """Layers with a critic each, which only the penalty uses."""

    def __init__(self, evaluate: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(evaluate) for _ in range(3))
        for layer in self.layers:
            layer.penalty = lambda x, critic=layer.critic: critic(x).exp().sum()

    def forward(self, x: Tensor) -> Tensor:
        loss = torch.zeros((), dtype=x.dtype)
        for layer in self.layers:
            x, penalty = layer(x)
            loss = loss + 0.7 * penalty
        return loss + x.sum()


def reduced_gradients(kind: str, evaluate: Callable[..., Tensor], rank: int) -> list[Tensor]:
    """The gradients that a reducer leaves after two steps on data that differ between ranks."""
    model: nn.Module = Sharded(evaluate)
    parameters = list(model.parameters())
    if kind == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for layer in model.layers:
            if kind == "FSDP2, critics too":
                fully_shard(layer.critic, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        parameters = list(model.parameters())
    for _ in range(2):
        model.zero_grad()
        model(network(rank + 7)[1].detach()).backward()
    found = [parameter.grad for parameter in parameters]
    return [getattr(grad, "full_tensor", lambda grad=grad: grad)() for grad in found]


def compare_reducers(rank: int, built_by: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", built_by, rank=rank, world_size=2)
    # Older versions of PyTorch cannot shard on the CPU.
    sharding = hasattr(torch.cpu.Stream, "record_event")
    for kind in ("DDP", "FSDP2", "FSDP2, critics too") if sharding else ("DDP",):
        plain = reduced_gradients(kind, lambda fn, x: fn(x), rank)
        for keep in ("exact", "recompute"):
            ours = reduced_gradients(kind, functools.partial(eager_backward, keep=keep), rank)
            assert len(ours) == 12
            assert_same(ours, plain)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # Everything has been compared. Threads of gloo may outlive the group, and on a busy machine abort an
    # interpreter that is shut down around them.
    os._exit(0)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_reducers_see_parameters_of_the_branch(tmp_path: Path) -> None:
    built_by = f"file://{tmp_path / 'built_by'}"
    torch.multiprocessing.spawn(compare_reducers, (built_by,), nprocs=2)


# ------------------------------------------------------------------------------- what is shown


DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_guide_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "eager.md").read_text(), re.DOTALL)
    assert len(blocks) >= 5
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(block, scope)
    assert scope["loss"].isfinite()
