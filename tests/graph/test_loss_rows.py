"""Sample n is row n of what the loss takes: along axis 0 or the declared one, in front of the reshape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import packprop
from packprop import extensions
from packprop.errors import PackpropError
from tests.cases.models.wrapping import Apply
from tests.references.running import assert_near
from tests.selection import one_in
from tests.versions import needs_hooks

N, T, D, C = 3, 4, 5, 2


def mixing(x: Tensor) -> Tensor:
    """A running sum over positions."""
    return x.cumsum(1)


def model_of(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Apply(forward, first=nn.Linear(D, D), head=nn.Linear(D, C), norm=nn.LayerNorm(C)).double()


def hidden(m: Any, x: Tensor) -> Tensor:
    return m.first(x).tanh().cumsum(1)


def check(model: nn.Module, x: Tensor, samples: int, owner: Callable[[Tensor], Tensor], **options: Any) -> None:
    """Gradients of samples, each that of the terms whose ``owner`` it is; ``owner`` maps terms to samples."""
    packprop.extend(model, **options)
    with packprop.disable():
        out = model(x)
    target = torch.randn_like(out)
    with packprop.backpack(extensions.BatchGrad(), extensions.BatchL2Grad()):
        F.mse_loss(model(x), target, reduction="sum").backward()
    with packprop.disable():
        terms = (model(x) - target).square()
    owners = owner(terms).expand(terms.shape)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        rows = [
            torch.autograd.grad(terms[owners == n].sum(), parameter, retain_graph=True, allow_unused=True)[0]
            for n in range(samples)
        ]
        expected = torch.stack([torch.zeros_like(parameter) if row is None else row for row in rows])
        assert_near(parameter.grad_batch, expected, name)
        assert_near(parameter.batch_l2, expected.flatten(1).square().sum(1), name)


def leading(parts: int = 1) -> Callable[[Tensor], Tensor]:
    """Terms of each sample one after the other along axis 0."""

    def owner(terms: Tensor) -> Tensor:
        rows = torch.arange(len(terms)) // parts
        return rows.view(-1, *[1] * (terms.dim() - 1))

    return owner


def inner(samples: int) -> Callable[[Tensor], Tensor]:
    """Terms of all samples in turn along axis 0."""

    def owner(terms: Tensor) -> Tensor:
        return (torch.arange(len(terms)) % samples).view(-1, *[1] * (terms.dim() - 1))

    return owner


FLATTENED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "flatten": lambda m, x: m.head(hidden(m, x)).flatten(0, 1),
    "view": lambda m, x: m.head(hidden(m, x)).view(-1, C),
    "reshape of a copy": lambda m, x: m.head(hidden(m, x)).transpose(0, 1).transpose(0, 1).reshape(-1, C),
    "before the head": lambda m, x: m.head(hidden(m, x).view(-1, D)),
    "before a normalised head": lambda m, x: m.norm(m.head(hidden(m, x).reshape(-1, D)).relu() * 2),
    "softmax behind it": lambda m, x: m.head(hidden(m, x)).flatten(0, 1).log_softmax(-1),
    "all in one": lambda m, x: m.head(hidden(m, x)).flatten(),
    "unflattened and flattened": lambda m, x: m.head(hidden(m, x)).flatten(0, 1).view(N, T, C).flatten(0, 1),
    "another type": lambda m, x: m.head(hidden(m, x)).flatten(0, 1).float().double(),
}


@pytest.mark.parametrize("name", FLATTENED)
def test_the_reshape_in_front_of_the_loss_shows_whose_rows_they_are(name: str) -> None:
    parts = T * C if name == "all in one" else T
    check(model_of(FLATTENED[name]), torch.randn(N, T, D).double(), N, leading(parts))


def flattened_before(m: Any, x: Tensor) -> Tensor:
    return m.head(m.first(x.flatten(0, 1)))


def flattened_behind(m: Any, x: Tensor) -> Tensor:
    return m.head(hidden(m, x)).flatten(0, 1)


SUMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "flattened second": lambda m, x: flattened_before(m, x) + flattened_behind(m, x),
    "flattened first": lambda m, x: flattened_behind(m, x) + flattened_before(m, x),
    "product": lambda m, x: flattened_before(m, x) * flattened_behind(m, x),
    "choice": lambda m, x: torch.where(
        torch.arange(N * T)[:, None] % 3 > 0, flattened_behind(m, x), m.norm.bias.expand(N * T, C)
    ),
    "the other choice": lambda m, x: torch.where(
        torch.arange(N * T)[:, None] % 3 > 0, m.norm.bias.expand(N * T, C), flattened_behind(m, x)
    ),
    "several sums": lambda m, x: (
        m.norm(flattened_before(m, x) + flattened_behind(m, x)) + flattened_before(m, x)
    ),
    "alike": lambda m, x: flattened_behind(m, x) + m.head(hidden(m, x)).unflatten(1, (2, -1)).flatten(0, 2),
    "parts": lambda m, x: m.head(hidden(m, x))[:, 1:].flatten(0, 1) + flattened_behind(m, x[:, 1:]),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_reshape_in_front_of_a_sum(name: str) -> None:
    """The order of summands does not matter."""
    check(model_of(SUMS[name]), torch.randn(N, T, D).double(), N, leading(T - (name == "parts")))


def test_a_table_that_was_flattened_shows_no_samples() -> None:
    """Positions on a grid, added to rows of as many samples."""
    for forward in (
        lambda m, x: m.first(x) + m.table.flatten(0, 1),
        lambda m, x: m.table.flatten(0, 1) + m.first(x),
    ):
        model = model_of(forward)
        model.table = nn.Parameter(torch.randn(2, 3, D).double())
        check(model, torch.randn(6, D).double(), 6, leading())


def test_summands_that_were_flattened_differently() -> None:
    model = model_of(lambda m, x: m.first(x).flatten(0, 1) + m.first(x.transpose(0, 1)).flatten(0, 1))
    told = refusal_of(model, torch.randn(N, T, D).double(), zero)
    assert "[3, 4] and [4, 3]" in told
    assert "documents=" in told


def test_a_chain_of_sums_takes_no_longer_than_its_nodes() -> None:
    """Paths double with each sum of two tensors of one shape."""

    def doubled(m: Any, x: Tensor) -> Tensor:
        out = flattened_behind(m, x)
        for _ in range(200):
            out = out.sin() + out
        return out

    check(model_of(doubled), torch.randn(N, T, D).double(), N, leading(T))


@pytest.mark.parametrize("samples", [1, N])
def test_rows_that_were_cut(samples: int) -> None:
    """``[n, t c]`` to ``[n t, c]``."""
    model = model_of(lambda m, x: m.first(x).tanh().view(-1, 1))
    check(model, torch.randn(samples, D).double(), samples, leading(D))


@pytest.mark.parametrize("kind", [nn.InstanceNorm1d, nn.GroupNorm])
def test_a_normalisation_that_the_loss_takes(kind: Any) -> None:
    """PyTorch folds the samples of an instance norm into its channels."""
    norm = kind(T, affine=True) if kind is nn.InstanceNorm1d else kind(2, T)
    model = Apply(lambda m, x: m.norm(m.first(x)), first=nn.Linear(D, D), norm=norm).double()
    check(model, torch.randn(N, T, D).double(), N, leading())


@pytest.mark.parametrize("name", ["flatten", "view"])
def test_a_batch_of_one_is_one_sample_of_all_rows(name: str) -> None:
    check(model_of(FLATTENED[name]), torch.randn(1, T, D).double(), 1, leading(T))


def test_the_nearest_reshape_counts() -> None:
    """Rows ``[n t, k, c]`` that become ``[n t k, c]`` are rows of ``n t`` samples."""
    model = model_of(lambda m, x: m.head(m.first(x.view(N * T, 1, D).expand(-1, 3, -1))).flatten(0, 1))
    check(model, torch.randn(N, T, D).double(), N * T, leading(3))


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_the_declared_axis_is_that_of_what_the_loss_takes(flat: bool, mixes: bool) -> None:
    """Time first into the loss, whatever the inputs have first."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.first(x).tanh()
        out = m.head(h.cumsum(1) if mixes else h).transpose(0, 1)
        return out.flatten(0, 1) if flat else out

    owner = inner(N) if flat else lambda terms: torch.arange(N).view(1, N, 1)
    for options in ({"sample_axis": 1}, {"sample_axis": -2}):
        check(model_of(forward), torch.randn(N, T, D).double(), N, owner, **options)


def test_a_declared_axis_between_others() -> None:
    model = model_of(lambda m, x: m.head(m.first(x)).flatten(0, 2))
    x = torch.randn(2, N, T, D).double()
    check(model, x, N, lambda terms: (torch.arange(2 * N * T) // T % N).view(-1, 1), sample_axis=1)


@pytest.mark.parametrize("module", [nn.LSTM, nn.GRU])
def test_a_time_first_layer_whose_last_step_the_loss_takes(module: Any) -> None:
    """Nothing needs to be declared: the loss takes ``[n, c]``."""
    torch.manual_seed(0)
    model = Apply(lambda m, x: m.head(m.layer(x)[0][-1]), layer=module(D, D), head=nn.Linear(D, C)).double()
    check(model, torch.randn(T, N, D).double(), N, leading())


def test_rows_of_the_loss_are_samples_whatever_the_inputs_are() -> None:
    """One step ``[1, n, d]``; positions that are averaged; rows."""
    check(model_of(lambda m, x: m.head(m.first(x).tanh())[0]), torch.randn(1, N, D).double(), N, leading())
    check(model_of(lambda m, x: m.head(m.first(x).mean(0))), torch.randn(T, N, D).double(), N, leading())
    check(model_of(lambda m, x: m.head(m.first(x).tanh())), torch.randn(N, D).double(), N, leading())


@pytest.mark.parametrize("kept", [[1, 3, 4], [2, 5], slice(3), slice(3, None), slice(1, 2)])
def test_some_rows_are_taken(kept: slice | list[int]) -> None:
    """The samples are those that the loss takes."""
    samples = len(torch.arange(6)[kept])
    model = model_of(lambda m, x: m.head(m.first(x).tanh())[kept])
    check(model, torch.randn(6, D).double(), samples, leading())


TAKEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mask": lambda out, mask: out[mask],
    "flat mask": lambda out, mask: out.flatten(0, 1)[mask.flatten()],
    "mask of bytes": lambda out, mask: out[mask.to(torch.uint8)],
    "flat mask of bytes": lambda out, mask: out.flatten(0, 1)[mask.flatten().to(torch.uint8)],
    "index": lambda out, mask: out.flatten(0, 1)[mask.flatten().nonzero()[:, 0]],
    "selected": lambda out, mask: out.flatten(0, 1).index_select(0, mask.flatten().nonzero()[:, 0]),
}


@pytest.mark.parametrize("way", TAKEN)
def test_rows_that_a_mask_takes_of_sequences(way: str) -> None:
    """``logits[mask]``: rows belong to the sequences that they were taken of; the next mask is another one."""
    model = model_of(lambda m, x: TAKEN[way](m.head(hidden(m, x)), m.mask))
    for mask in (
        [[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]],
        [[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]],
        [[0, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]],
    ):
        model.mask = torch.tensor(mask, dtype=torch.bool)
        owners = torch.arange(N)[:, None].expand(N, T)[model.mask]
        check(model, torch.randn(N, T, D).double(), N, lambda terms, own=owners: own.view(-1, 1))


@pytest.mark.parametrize("wide", [False, True])
def test_numbers_that_a_mask_selects(wide: bool) -> None:
    """``out.masked_select(mask)`` takes what ``out[mask]`` does, if the mask has its shape."""
    model = model_of(lambda m, x: m.head(hidden(m, x)).masked_select(m.mask))
    x = torch.randn(N, T, D).double()
    for seed in range(3):
        model.mask = torch.rand(N, T, 1 if wide else C, generator=torch.Generator().manual_seed(seed)) < 0.6
        owners = torch.arange(N)[:, None, None].expand(N, T, C)[model.mask.expand(N, T, C)]
        if wide:
            with pytest.raises(PackpropError):
                check(model, x, N, lambda terms, own=owners: own)
        else:
            check(model, x, N, lambda terms, own=owners: own)


ROWS_IN_TURN: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "row": lambda out, y, n: F.cross_entropy(out[n], y[n]),
    "row with an axis": lambda out, y, n: F.cross_entropy(out[n][None], y[n : n + 1]),
    "row that is viewed": lambda out, y, n: F.cross_entropy(out[n].view(1, -1), y[n : n + 1]),
    "slice without its axis": lambda out, y, n: F.cross_entropy(out[n : n + 1].squeeze(0), y[n]),
    "row that is scaled": lambda out, y, n: F.cross_entropy(out[n] / 0.5, y[n]),
    "logarithms of a row": lambda out, y, n: F.nll_loss(out[n].log_softmax(-1), y[n]),
    "row of a chunk": lambda out, y, n: F.cross_entropy(out.chunk(2)[n // 3][n % 3], y[n]),
    "row of a slice": lambda out, y, n: F.cross_entropy(out[n:][0], y[n]),
    "part of a chunk": lambda out, y, n: F.cross_entropy(out.chunk(2)[n // 3][n % 3 :][:1], y[n : n + 1]),
}


def gradients_of(model: nn.Module, x: Tensor, loss: Callable[[Any], Tensor], **options: Any) -> list[Tensor]:
    """Gradients of samples, for each parameter."""
    packprop.extend(model, **options)
    with packprop.record(), packprop.backpack(extensions.BatchGrad()):
        loss(model(x)).backward()
    return [parameter.grad_batch for parameter in model.parameters() if parameter.grad is not None]


@one_in(2)
@pytest.mark.parametrize("way", ROWS_IN_TURN)
def test_losses_of_single_rows_in_a_loop(way: str) -> None:
    """They take the samples of the tensor that the rows are of, however each is taken."""
    model, x, y = (
        model_of(lambda m, x: m.head(m.first(x).tanh())),
        torch.randn(6, D).double(),
        torch.arange(6) % C,
    )
    found = gradients_of(model, x, lambda out: sum(ROWS_IN_TURN[way](out, y, n) for n in range(6)))
    with packprop.disable():
        rows = [ROWS_IN_TURN[way](model(x), y, n) for n in range(6)]
    own = [parameter for parameter in model.parameters() if parameter.grad is not None]
    for n, row in enumerate(rows):
        for parameter, gradients in zip(torch.autograd.grad(row, own), found, strict=True):
            assert len(gradients) == 6
            assert_near(gradients[n], parameter, way)


def test_flattened_rows_in_a_loop_are_positions() -> None:
    """As a slice of one row of them is."""
    x = torch.randn(N, T, D).double()
    loops: list[Callable[[Tensor], Tensor]] = [
        lambda out: sum(F.cross_entropy(out[k], torch.tensor(0)) for k in range(N * T)),
        lambda out: sum(F.cross_entropy(out[k : k + 1], torch.tensor([0])) for k in range(N * T)),
        classes_of_all,
    ]
    found = [gradients_of(model_of(FLATTENED["flatten"]), x, loop) for loop in loops]
    for gradients in zip(*found, strict=True):
        assert len(gradients[0]) == N
        assert_near(gradients[0], gradients[2], "rows")
        assert_near(gradients[1], gradients[2], "slices")


def classes_of_all(out: Tensor) -> Tensor:
    return F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long), reduction="sum")


def test_two_losses_of_the_same_rows() -> None:
    """They are no parts in turn: samples are the rows that both take, as one of them alone says."""
    model, x = model_of(lambda m, x: m.head(m.first(x))), torch.randn(6, D).double()
    one = gradients_of(model, x, lambda out: classes_of_all(out[:3]))
    two = gradients_of(model, x, lambda out: classes_of_all(out[:3]) + classes_of_all(out[:3]))
    for alone, both in zip(one, two, strict=True):
        assert len(alone) == 3
        assert_near(both, 2 * alone, "same rows")


@pytest.mark.parametrize("take", [lambda w, ids: w[ids], lambda w, ids: w.index_select(0, ids)])
def test_two_losses_of_rows_of_one_table(take: Callable[..., Tensor]) -> None:
    """The rows of the table are no samples."""
    table, targets = nn.Parameter(torch.randn(D, C)), torch.randn(2, N, C)
    ids = torch.tensor([[1, 4, 1], [0, 3, 1]])

    def loss(at: slice) -> Tensor:
        pairs = zip(ids[:, at], targets[:, at], strict=True)
        return torch.stack([F.mse_loss(take(table, own), y, reduction="sum") for own, y in pairs]).sum()

    rows = [torch.autograd.grad(loss(slice(n, n + 1)), table)[0] for n in range(N)]
    with packprop.record(), packprop.backpack(extensions.BatchGrad()):
        loss(slice(N)).backward()
    assert_near(table.grad_batch, torch.stack(rows), "table")


def test_one_step_that_is_squeezed() -> None:
    """A linear layer flattens ``[1, n, d]`` inside of itself: that says nothing of the samples."""
    x = torch.randn(1, N, D).double()
    check(model_of(lambda m, x: m.head(m.first(x).tanh()).squeeze(0)), x, N, leading())
    check(model_of(lambda m, x: m.head(m.first(x).tanh().squeeze(0))), x, N, leading())
    check(model_of(lambda m, x: m.head(m.first(x).tanh()).squeeze(1)), x.transpose(0, 1), N, leading())


@pytest.mark.parametrize("axis", [1, -2])
def test_one_sample_on_the_declared_axis(axis: int) -> None:
    model = model_of(lambda m, x: m.head(m.first(x).tanh()))
    check(
        model,
        torch.randn(T, 1, D).double(),
        1,
        lambda terms: torch.zeros(1, dtype=torch.long),
        sample_axis=axis,
    )


def test_an_instance_norm_of_one_channel() -> None:
    model = Apply(lambda m, x: m.b(m.a(x)), a=nn.Conv1d(D, 1, 1), b=nn.InstanceNorm1d(1, affine=True)).double()
    check(model, torch.randn(N, D, T).double(), N, leading())


def test_a_batch_in_chunks_of_calls() -> None:
    for size in (1, 2, 4):
        model = model_of(lambda m, x, size=size: torch.cat([m.head(m.first(x)) for x in x.split(size)]))
        check(model, torch.randn(6, D).double(), 6, leading())


def refusal_of(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor], **options: Any) -> str:
    packprop.extend(model, **options)
    with pytest.raises(PackpropError) as caught, packprop.record(), packprop.backpack(extensions.BatchGrad()):
        loss(model(x)).backward()
    assert not any(hasattr(parameter, "grad_batch") for parameter in model.parameters())
    return str(caught.value)


def zero(out: Tensor) -> Tensor:
    return F.mse_loss(out, torch.zeros_like(out))


def classes(out: Tensor) -> Tensor:
    return F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long))


def test_positions_that_meet_are_no_samples() -> None:
    """Time first into the loss, and nothing declared; the advice is followed elsewhere on this page."""
    model = model_of(lambda m, x: m.head(hidden(m, x)).transpose(0, 1))
    told = refusal_of(model, torch.randn(N, T, D).double(), zero)
    assert "one of the 4 samples" in told
    assert "sample_axis=1" in told
    rows = model_of(
        lambda m, x: m.head(
            m.first(x)
            .view(N, T, D)
            .cumsum(1)
            .sin()
            .mul(2)
            .sum(2, keepdim=True)
            .expand(N, T, D)
            .permute(1, 0, 2)
            .reshape(N * T, D)
        )
    )
    told = refusal_of(rows, torch.randn(N * T, D).double(), zero)
    assert "[n, t, c]" in told


def test_an_axis_that_the_loss_does_not_take() -> None:
    x = torch.randn(N, D).double()
    told = refusal_of(model_of(lambda m, x: m.head(m.first(x))), x, classes, sample_axis=1)
    assert "that of the classes" in told
    assert "leave sample_axis out" in told
    told = refusal_of(model_of(lambda m, x: m.head(m.first(x))), x, zero, sample_axis=2)
    assert "no such axis" in told
    told = refusal_of(model_of(FLATTENED["flatten"]), torch.randn(N, T, D).double(), classes, sample_axis=2)
    assert "no such axis" in told


def test_losses_that_take_different_numbers_of_samples() -> None:
    model = model_of(lambda m, x: m.head(m.first(x)))
    told = refusal_of(model, torch.randn(N, D).double(), lambda out: zero(out) + zero(torch.cat([out, out])))
    assert "different numbers of samples" in told


def test_models_that_declare_different_axes() -> None:
    one, two = (packprop.extend(nn.Linear(D, C).double(), sample_axis=axis) for axis in (0, 1))
    x = torch.randn(N, T, D).double()
    with pytest.raises(PackpropError, match="sample_axis=0 and sample_axis=1"), packprop.record():
        loss = zero(one(x)) + zero(two(x).transpose(0, 1))
        with packprop.backpack(extensions.BatchGrad()):
            loss.backward()


@pytest.mark.parametrize("declared", ["1", 1.5, (1, None), {"src": 1}, True])
def test_what_is_no_axis(declared: Any) -> None:
    with pytest.raises(packprop.errors.BadInput, match="for the loss's input"):
        packprop.extend(nn.Linear(3, 2), sample_axis=declared)
    with pytest.raises(packprop.errors.BadInput, match="sample_axis"), packprop.record(sample_axis=declared):
        pass


class Operations(TorchDispatchMode):
    """Counts what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@needs_hooks
@pytest.mark.parametrize("run", [lambda f, x: f(x), partial(checkpoint, use_reentrant=False)])
def test_a_forward_pass_computes_what_it_does_without_packprop(run: Callable[..., Tensor]) -> None:
    """The first one of a shape among them."""
    model = Apply(lambda m, x: run(m.a, x.flatten(1)[:, :6]), a=nn.Linear(6, 2))
    x = torch.randn(5, 5, 3)
    counts = []
    for extended in (False, True, True):
        if extended:
            packprop.extend(model)
        with Operations() as counted:
            model(x)
        counts.append(counted.counts)
    assert counts[0] == counts[1] == counts[2]
