"""Samples that are mixed by values which happen to be zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import packprop
from packprop import extensions
from packprop.engine.samples import locating as located
from packprop.engine.samples.hidden_mixing import parts
from packprop.errors import PackpropError
from tests.cases.models.wrapping import Apply
from tests.graph.one_by_one import GatedMean, check, double
from tests.selection import one_in


class Gated(nn.Module):
    """``h + k * mix(h)`` between two layers, with ``k`` in a buffer."""

    k: Tensor

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix
        self.first, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
        self.register_buffer("k", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.head(h + self.k * self.mix(h))


def refused(model: nn.Module, x: Tensor, *named: str) -> None:
    """A pass is refused, and nothing is saved."""
    for parameter in model.parameters():
        vars(parameter).pop("grad_batch", None)
    loss = packprop.extend(nn.MSELoss())(packprop.extend(model)(x), torch.zeros(len(x), 2).to(x))
    with pytest.raises(PackpropError, match="sample") as caught, packprop.backpack(extensions.BatchGrad()):
        loss.backward()
    for name in named:
        assert name in str(caught.value)
    assert not any(hasattr(p, "grad_batch") for p in model.parameters())


HIDEABLE = [
    pytest.param(lambda h: h - h.mean(0), id="mean"),
    pytest.param(lambda h: h @ h.T @ h, id="gram"),
    pytest.param(lambda h: h.softmax(0), id="softmax"),
    pytest.param(lambda h: h.cumsum(0), id="cumulative"),
    pytest.param(lambda h: torch.roll(h, 1, 0), id="roll"),
    pytest.param(lambda h: torch.cat([h[:-1], h[-1:] + h[-2:-1]]), id="last-pair"),
    pytest.param(lambda h: h.max(0).values, id="maximum"),
]


@one_in(3)
@pytest.mark.parametrize("size", [2, 3, 5, 9])
@pytest.mark.parametrize("mix", HIDEABLE)
def test_a_gate_in_a_buffer_that_opens_later(mix: Callable[[Tensor], Tensor], size: int) -> None:
    """Closed, numbers are right; opened, the pass is refused; closed, they are right again."""
    model = double(Gated(mix))
    x = torch.randn(size, 3).double()
    for k in (0.0, 1.0, 0.0, 1e-3):
        model.k.fill_(k)
        if k:
            refused(model, x)
        else:
            check(model, x)


@one_in(2)
@pytest.mark.parametrize(
    "hide",
    [
        pytest.param(lambda h, m, k: torch.where(k > 0, h + m, h), id="where"),
        pytest.param(lambda h, m, k: h + torch.relu(k - 0.5) * m, id="relu"),
        pytest.param(lambda h, m, k: h + torch.relu(m + 100 * (k - 0.5)), id="open-relu"),
        pytest.param(lambda h, m, k: torch.maximum(h, m + 100 * (k - 0.5)), id="maximum"),
        pytest.param(lambda h, m, k: h + m.masked_fill(k < 0.5, 0.0), id="masked"),
        pytest.param(lambda h, m, k: torch.lerp(h, m.expand_as(h), k), id="lerp"),
        pytest.param(lambda h, m, k: h + m.clamp(min=100 * (0.5 - k)), id="clamp"),
        pytest.param(lambda h, m, k: torch.addcmul(h, m.expand_as(h), k), id="addcmul"),
    ],
)
def test_a_gate_that_depends_on_the_data(hide: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Every batch is looked at by itself: one that opens the gate is refused, one that does not is right."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = torch.tanh(m.first(x))
        return m.head(hide(h, h.mean(0), (x[0, 0] > 0).to(x.dtype)))

    model = double(Apply(forward, first=nn.Linear(3, 3), head=nn.Linear(3, 2)))
    for sign in (-1.0, 1.0, -1.0, 1.0):
        x = torch.randn(4, 3).double()
        x[0, 0] = sign
        if sign > 0:
            refused(model, x)
        else:
            check(model, x)


def test_a_number_as_a_gate() -> None:
    gate = [0.0]

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = torch.tanh(m.first(x))
        return m.head(h + gate[0] * (h - h.mean(0)))

    model = double(Apply(forward, first=nn.Linear(3, 3), head=nn.Linear(3, 2)))
    x = torch.randn(4, 3).double()
    check(model, x)
    gate[0] = 1.0
    refused(model, x)


def test_a_leak_that_is_small() -> None:
    """Two samples, a thousandth of a thousandth of a mean, in single precision."""
    model = Gated(lambda h: h.mean(0))
    model.k.fill_(1e-6)
    refused(model, torch.randn(2, 3))


def test_a_trainable_gate_of_zero_on_the_mean_of_the_batch() -> None:
    """The gate's own gradient for one sample depends on the others: refused by its name in the first pass."""
    refused(double(GatedMean()), torch.randn(4, 3).double(), "'gate'")


def test_a_trainable_matrix_of_zeros_over_samples() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = torch.tanh(m.first(x))
        return m.head(h + m.over.weight @ h)

    model = Apply(forward, first=nn.Linear(3, 3), head=nn.Linear(3, 2), over=nn.Linear(4, 4, bias=False))
    nn.init.zeros_(model.over.weight)
    refused(double(model), torch.randn(4, 3).double(), "over.weight")


def test_a_trainable_gate_behind_one_in_a_buffer() -> None:
    """Of two closed gates the buffer's hides the other: looked at anew when it opens, and in each pass then."""

    class Two(Gated):
        def __init__(self) -> None:
            super().__init__(lambda h: self.gate * h.mean(0).expand_as(h))
            self.gate = nn.Parameter(torch.zeros(()))

    model = double(Two())
    x = torch.randn(4, 3).double()
    for _ in range(3):
        check(model, x)
    model.k.fill_(1.0)
    for _ in range(3):
        refused(model, x, "'gate'")
    model.k.fill_(0.0)
    check(model, x)


def test_what_parameters_hide_is_looked_for_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the 1st, 2nd, 4th, 8th pass, and after a change of a buffer or a frozen parameter."""
    looks: list[int] = []
    find = located.find_hidden
    monkeypatch.setattr(located, "find_hidden", lambda *given: looks.append(number) or find(*given))
    model = Gated(lambda h: h.mean(0))
    model.head.requires_grad_(False)
    packprop.extend(model)
    loss = packprop.extend(nn.MSELoss())
    for number in range(1, 17):
        if number == 11:
            model.k.zero_()
        if number == 13:
            model.head.bias.data = torch.ones(2)
        with packprop.backpack(extensions.BatchGrad()):
            loss(model(torch.randn(4, 3)), torch.zeros(4, 2)).backward()
    assert looks == [1, 2, 4, 8, 11, 12, 13, 14, 16]


def kept(model: nn.Module) -> int:
    """For how many kinds of passes the places of the samples are known."""
    return len(located._KNOWN[model].locations)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), id="mlp"),
        pytest.param(
            lambda: nn.Sequential(
                nn.Unflatten(1, (1, 3)),
                nn.Conv1d(1, 3, 2),
                nn.ReLU(),
                nn.MaxPool1d(2),
                nn.Flatten(),
                nn.Linear(3, 2),
            ),
            id="convolution",
        ),
        pytest.param(
            lambda: nn.Sequential(
                nn.Linear(3, 8),
                nn.Unflatten(1, (2, 4)),
                nn.TransformerEncoderLayer(4, 2, 4, batch_first=True),
                nn.Flatten(),
                nn.Linear(8, 2),
            ),
            id="attention",
        ),
        pytest.param(lambda: Zeros("b"), id="low-rank-adapter"),
        pytest.param(lambda: Zeros("gamma"), id="residual-scale"),
        pytest.param(lambda: Zeros("head"), id="head-of-zeros"),
    ],
)
def test_separate_models_are_looked_at_once(model: Callable[[], nn.Module]) -> None:
    """Zeros in parameters hide nothing where nothing mixes samples: accepted, and never looked at again."""
    made = double(model()).eval()
    x = torch.randn(4, 3).double()
    check(made, x)
    assert kept(made) == 1


class Zeros(nn.Module):
    """An adapter and a residual branch, one part of which is zero at first."""

    def __init__(self, zero: str) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(1, 3)
        self.head = nn.Linear(3, 2)
        self.gamma = nn.Parameter(torch.ones(3))
        parts = dict(self.named_parameters())
        with torch.no_grad():
            for name in (zero, f"{zero}.weight"):
                if name in parts:
                    parts[name].zero_()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.head(h + self.gamma * self.b(torch.relu(self.a(h))))


def test_a_batched_graph_is_looked_at_in_every_pass() -> None:
    """A block-diagonal matrix keeps the samples apart by its values: right, until another matrix comes."""

    def forward(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        h = torch.tanh(batch["matrix"] @ m.first(batch["x"]))
        return m.head(h).view(3, 2, 2).mean(1)

    model = double(Apply(forward, first=nn.Linear(3, 3), head=nn.Linear(3, 2)))
    x = torch.randn(6, 3).double()
    blocks = torch.block_diag(*[torch.rand(2, 2) for _ in range(3)]).double()
    packprop.extend(model)

    def run(matrix: Tensor) -> None:
        with packprop.backpack(extensions.BatchGrad()):
            packprop.extend(nn.MSELoss())(
                model({"matrix": matrix, "x": x}), torch.zeros(3, 2).double()
            ).backward()

    for _ in range(2):
        run(blocks)
        assert model.first.weight.grad_batch.shape == (3, 3, 3)
        with pytest.raises(PackpropError, match="sample"):
            run(blocks + 0.1)


def test_anomaly_mode_and_users_hooks_do_not_meet_what_is_fed_in() -> None:
    """PyTorch's search for NaN says nothing about a right model; nor does a function that refuses NaN."""

    class Strict(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> Tensor:
            if gradients[0].isnan().any():
                raise ValueError("NaN")
            return gradients[0]

    model = double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    x = torch.randn(4, 3).double()
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        check(model, x)
    strict = Apply(
        lambda m, x: m.head(Strict.apply(torch.tanh(m.first(x)))), first=nn.Linear(3, 3), head=nn.Linear(3, 2)
    )
    check(double(strict), x)
    check(strict, x)


@pytest.mark.parametrize("samples", [2, 3, 4, 6, 7, 20, 21, 128, 300])
def test_any_sample_is_fed_once_without_any_other(samples: int) -> None:
    fed = torch.stack(parts(samples, every=True)).double()
    alone = fed.T @ (1 - fed)  # [i, j]: in how many sweeps i is fed and j is not
    assert bool((alone + torch.eye(samples).double() > 0).all())
    some = parts(samples, every=False)
    assert torch.equal(some[0], ~some[1])
    assert all(bool(half.any()) for half in some)


class Vanishing(nn.Module):
    """Layers behind which nothing is left of a cotangent in single precision."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.layers, self.mixes = nn.ModuleList(nn.Linear(4, 4) for _ in range(16)), mixes
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.mul_(1e-3)

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if self.mixes and place == 6:
                x = x - x.mean(0)
        return x


@pytest.mark.parametrize("samples", [2, 3, 60])
def test_cotangents_too_small_for_the_precision(samples: int) -> None:
    """What rounding leaves of them says nothing about the samples; mixing among them is found all the same."""
    torch.manual_seed(0)
    x, y = torch.randn(samples, 4), torch.randn(samples, 4)
    loss = packprop.extend(nn.MSELoss(reduction="sum"))
    model = packprop.extend(Vanishing(mixes=False))
    with packprop.backpack(extensions.BatchGrad(), extensions.DiagHessian()):
        loss(model(x), y).backward()
    last = model.layers[-1]
    torch.testing.assert_close(last.bias.grad_batch, 2 * (model(x) - y).detach())
    assert model.layers[0].weight.grad_batch.shape == (samples, 4, 4)
    mixing = packprop.extend(Vanishing(mixes=True))
    with pytest.raises(PackpropError, match="mixed"), packprop.backpack(extensions.BatchGrad()):
        loss(mixing(x), y).backward()


class OnceDifferentiable(nn.Module):
    """``h + gate * h.flip(0)`` before, in or behind what cannot be differentiated twice; the gate is zero."""

    def __init__(self, through: Callable[..., Tensor], where: str) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.gate = nn.Parameter(torch.zeros(1))
        self.through, self.where = through, where

    def mix(self, h: Tensor, where: str) -> Tensor:
        return h + self.gate * h.flip(0) if where == self.where else h

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(self.first(x), "before")
        h = self.mix(self.through(lambda h: torch.tanh(self.mix(h, "in")) + h, h), "behind")
        return self.head(h.mean(1))


def with_attention(function: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return function(h) + scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])[:, 0]


ONCE = {
    "attention": with_attention,
    "distances": lambda function, h: torch.cdist(function(h), h) @ h,
}


@pytest.mark.parametrize("where", ["before", "in", "behind"])
@pytest.mark.parametrize("through", ONCE)
def test_a_trainable_gate_where_no_second_derivative_is(through: str, where: str) -> None:
    model = double(OnceDifferentiable(ONCE[through], where))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        model.first.bias[0] = before["first.bias"][0] = -0.0
    versions = [p._version for p in model.parameters()]
    refused(model, torch.randn(5, 3, 4).double(), "'gate'")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert torch.equal(parameter.signbit(), before[name].signbit())
    assert [p._version for p in model.parameters()] == versions
    with torch.no_grad():
        model.gate.fill_(0.5)
    refused(model, torch.randn(5, 3, 4).double())


@pytest.mark.parametrize("through", ["attention", "distances"])
def test_zeros_that_hide_nothing(through: str) -> None:
    """Biases of zero, and data that keep samples apart: the numbers are right."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = ONCE[through](torch.tanh, m.first(x))
        apart = torch.where(x.isfinite().all(), torch.eye(len(x), dtype=x.dtype), 1.0)
        return m.head(torch.einsum("nm,m...->n...", apart, h).mean(1))

    model = Apply(forward, first=nn.Linear(4, 4), head=nn.Linear(4, 2))
    nn.init.zeros_(model.first.bias)
    check(double(model), torch.randn(5, 3, 4).double(), seed=0)


class Selected(nn.Module):
    """A selection along the axis of the samples, each of which selects itself as long as they lie far apart."""

    def __init__(self, select: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.select = nn.Linear(3, 2), nn.Linear(2, 3), select

    def forward(self, x: Tensor, gap: float) -> Tensor:
        h = self.first(x).tanh() + gap * torch.arange(4.0, dtype=x.dtype)[:, None]
        out: Tensor = self.last(self.select(h))
        return out


def among(select: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Each sample with an entry that is selected, without an axis, of three that end with its own."""

    def selected(h: Tensor) -> Tensor:
        return h + torch.stack([select(h[: place + 1].flatten()[-3:]) for place in range(4)])[:, None]

    return selected


@pytest.mark.parametrize(
    "select",
    [
        lambda h: h.cummax(0).values,
        lambda h: -(-h).cummin(0).values,
        lambda h: h.sort(0).values,
        lambda h: torch.stack([h[: place + 1].max(0).values for place in range(4)]),
        among(torch.max),
        among(lambda h: -(-h).min()),
        among(torch.median),
        among(torch.nanmedian),
    ],
    ids=["cummax", "cummin", "sort", "maxima", "maximum", "minimum", "median", "nanmedian"],
)
def test_a_selection_that_takes_other_samples_later(select: Callable[[Tensor], Tensor]) -> None:
    """The first pass does not vouch for the second, whose values mix the samples."""
    torch.manual_seed(0)
    model = packprop.extend(Selected(select).double())
    x, y = torch.randn(4, 3).double(), torch.randint(3, (4,))
    with packprop.backpack(extensions.BatchGrad()):
        nn.functional.cross_entropy(model(x, 9.0), y).backward()
    with pytest.raises(PackpropError, match="mixed"), packprop.backpack(extensions.BatchGrad()):
        nn.functional.cross_entropy(model(x, 0.0), y).backward()


def test_pools_over_pixels_are_looked_at_once() -> None:
    """A pool selects within a sample: the places of the samples are remembered."""
    model = packprop.extend(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)).double()
    )
    x, y = torch.randn(5, 1, 6, 6).double(), torch.randint(3, (5,))
    with packprop.backpack(extensions.BatchGrad()):
        nn.functional.cross_entropy(model(x), y).backward()
    assert [*located._KNOWN[model].locations]


class Switched(nn.Module):
    """A function between two layers that another argument turns into one that mixes samples."""

    def __init__(self, function: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(3, 4), nn.Linear(4, 3), function

    def forward(self, x: Tensor, mixes: bool) -> Tensor:
        out: Tensor = self.last(self.function(self.first(x), mixes))
        return out


def written(h: Tensor, mixes: bool) -> Tensor:
    """The sum of each sample in its first entry; or all sums in the first sample."""
    h, sums = h.clone(), h.sum(1)
    h[0 if mixes else slice(None), slice(None) if mixes else 0] = sums
    return h


def placed(h: Tensor, mixes: bool) -> Tensor:
    """Rows that are written one by one, beside those from which they come."""
    out = torch.zeros_like(h)
    for place, row in enumerate([1, 2, 0, 3] if mixes else range(4)):
        out[place] = h[row].tanh()
    return out + h


def sampled(h: Tensor, mixes: bool) -> Tensor:
    """Pixels in a column, one for each sample, that a grid chooses."""
    places = torch.linspace(-1, 1, 4, dtype=h.dtype)[[0, 0, 1, 2] if mixes else [0, 1, 2, 3]]
    grid = torch.stack([torch.zeros_like(places), places], -1)[None, :, None]
    pixels = F.grid_sample(h.T[None, :, :, None], grid, mode="nearest", align_corners=True)
    return h + pixels[0, :, :, 0].T


def blended(h: Tensor, mixes: bool) -> Tensor:
    """The mean over the samples for each of them; or zero, with the same derivative."""
    mean = h.mean(0).expand_as(h)
    return mean - (1 - mixes) * mean.detach()


def rounded(h: Tensor, mixes: bool) -> Tensor:
    """Numbers within the range of integers, or beyond it, which has the mean of the batch as its zero."""
    given = torch.full_like(h, 100 * mixes, dtype=torch.float32)
    zero = h.mean()[None].float()
    return h + torch._fake_quantize_learnable_per_tensor_affine(given, torch.ones(1), zero, -5, 5)


@one_in(3)
@pytest.mark.parametrize(
    "function",
    [
        written,
        placed,
        sampled,
        rounded,
        lambda h, mixes: torch.renorm(h, 2, 1, 1e-3 if mixes else 1e3),
        lambda h, mixes: h + torch.cdist(*[h - (1 - mixes) * h.detach()] * 2).sum(1, keepdim=True),
        lambda h, mixes: h + (h * float(mixes)).cumprod(0),
        lambda h, mixes: h + (h * float(mixes)).prod(0),
        lambda h, mixes: h + (h * float(mixes)).prod(),
        lambda h, mixes: h + (h - (1 - mixes) * h.detach()).std(0, keepdim=True),
        lambda h, mixes: h + F.pdist(h - (1 - mixes) * h.detach()).sum(),
        lambda h, mixes: h + (h - (1 - mixes) * h.detach()).norm(3, dim=0),
        lambda h, mixes: h + F.prelu(h.tanh() + 2 - 4 * mixes, h.mean(0)),
        lambda h, mixes: h + torch.nextafter(h.mean(0).expand_as(h), h.detach().mean(0) + mixes),
        lambda h, mixes: h + torch.xlogy(blended(h, mixes), torch.full_like(h, 4 * mixes - 2)),
        lambda h, mixes: h + torch.special.xlog1py(blended(h, mixes), torch.full_like(h, 4 * mixes - 2)),
        lambda h, mixes: h + torch.ormqr(h.detach()[:, :1], h.detach()[0, :1] * mixes, h),
        lambda h, mixes: h + (mixes * h.mean(0)).expand_as(h).to_sparse().to_dense(),
        lambda h, mixes: h + (mixes * h.mean(0, True)).to_sparse_csr().to_dense(),
    ],
    ids=[
        *("view", "rows", "grid", "integers", "renorm", "distances", "products", "product", "product of all"),
        *("deviation", "pairs", "norm", "slopes", "neighbours", "xlogy", "xlog1py", "reflections"),
        *("sparse", "sparse rows"),
    ],
)
@pytest.mark.parametrize("before", [1, 4])
def test_a_function_that_mixes_samples_in_a_later_pass(
    function: Callable[[Tensor, bool], Tensor], before: int
) -> None:
    torch.manual_seed(0)
    model = packprop.extend(Switched(function).double())
    x, y = torch.randn(4, 3).double(), torch.randint(3, (4,))
    for _ in range(before):
        with packprop.backpack(extensions.BatchGrad()):
            nn.functional.cross_entropy(model(x, False), y).backward()
    with pytest.raises(PackpropError, match="mixed"), packprop.backpack(extensions.BatchGrad()):
        nn.functional.cross_entropy(model(x, True), y).backward()
