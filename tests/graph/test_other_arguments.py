"""Losses whose other arguments depend on parameters, too: targets, variances, second towers, negatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop.errors import PackpropError
from packprop.extensions import BatchDiagHessian, BatchGrad, DiagGGNExact, DiagHessian, SumGradSquared, Variance
from tests.references.running import assert_near

SAMPLES = 5
ORDER = torch.tensor([1, 2, 3, 4, 0])


def tower(**options: Any) -> nn.Module:
    return packprop.extend(nn.Linear(4, 3).double(), **options)


def towers() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return tower(), tower(), torch.randn(SAMPLES, 4).double(), torch.randn(SAMPLES, 4).double()


class Variational(nn.Module):
    """A loss of one's own, with means and logarithms of variances beside the output."""

    def forward(self, out: Tensor, target: Tensor, mean: Tensor) -> Tensor:
        return ((out - target) ** 2).sum() / len(out) + (mean.exp() - mean).sum() / len(out)


variational = packprop.extend(Variational())

ZEROS = torch.zeros(SAMPLES, 3).double()
KEPT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "target": F.mse_loss,
    "both in another order": lambda q, d: F.mse_loss(q[ORDER], d[ORDER])[None].sum(),
    "variance": lambda q, d: F.gaussian_nll_loss(q, ZEROS[: len(q)], d.exp()),
    "variance of each sample": lambda q, d: F.gaussian_nll_loss(q, ZEROS[: len(q)], d[:, :1].exp()),
    "variance without an axis": lambda q, d: F.gaussian_nll_loss(q, ZEROS[: len(q)], d[:, 0].exp()),
    "probabilities": lambda q, d: F.cross_entropy(q, d.softmax(1)),
    "divergence": lambda q, d: F.kl_div(q.log_softmax(1), d.softmax(1), reduction="batchmean"),
    "negatives": lambda q, d: F.triplet_margin_loss(q, d, d.flip(1), margin=9.0),
    "cosines": lambda q, d: F.cosine_embedding_loss(q, d, torch.ones(len(q)).double()),
    "own loss": lambda q, d: variational(q, ZEROS[: len(q)], d[:, :2]),
}
MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean of targets": lambda q, d: F.mse_loss(q, d.mean(0, keepdim=True).expand_as(q)),
    "its own, turned": lambda q, d: F.mse_loss(q, q.flip(0)),
    "one of two in another order": lambda q, d: F.mse_loss(q, d[ORDER]) + F.mse_loss(q, d),
    "variance of the batch": lambda q, d: F.gaussian_nll_loss(
        q, ZEROS, d.exp().mean(0, keepdim=True).expand_as(q)
    ),
    "turned negatives": lambda q, d: F.triplet_margin_loss(q, d, d.roll(1, 0), margin=9.0),
    "mean of probabilities": lambda q, d: F.cross_entropy(q, d.softmax(1).mean(0, keepdim=True).expand_as(q)),
}


def single(loss: Callable[[Tensor, Tensor], Tensor], q: Tensor, d: Tensor, n: int) -> Tensor:
    """The term of one sample, which a batch of it gives ``SAMPLES`` times as large."""
    return loss(q[n : n + 1], d[n : n + 1]) / SAMPLES


@pytest.mark.parametrize("name", KEPT)
def test_rows_of_both_towers(name: str) -> None:
    a, b, x, z = towers()
    loss = KEPT[name]
    order = ORDER if "order" in name else torch.arange(SAMPLES)
    with packprop.record(), packprop.backpack(BatchGrad()):
        loss(a(x), b(z)).backward()
    plain = F.mse_loss if "order" in name else loss
    for parameter in (a.weight, a.bias, b.weight, b.bias):
        rows = [torch.autograd.grad(single(plain, a(x), b(z), n), parameter)[0] for n in order.tolist()]
        assert_near(parameter.grad_batch, torch.stack(rows), name, 1e-10)


@pytest.mark.parametrize("name", MIXED)
def test_samples_that_meet_there_are_refused(name: str) -> None:
    a, b, x, z = towers()
    with packprop.record(), packprop.backpack(BatchGrad()), pytest.raises(PackpropError, match=r"mix|shapes"):
        MIXED[name](a(x), b(z)).backward()
    assert not hasattr(a.weight, "grad_batch")


def test_a_declared_axis_holds_in_all_arguments() -> None:
    torch.manual_seed(0)
    a, b = tower(sample_axis=1), tower(sample_axis=1)
    x, z = torch.randn(3, 2, 4).double(), torch.randn(3, 2, 4).double()
    with packprop.backpack(BatchGrad()):
        F.mse_loss(a(x), b(z)).backward()
    for n in range(2):
        term = F.mse_loss(a(x[:, n : n + 1]), b(z[:, n : n + 1])) / 2
        assert_near(b.weight.grad_batch[n], torch.autograd.grad(term, b.weight)[0], "row", 1e-10)


def test_a_tower_that_works_along_another_axis() -> None:
    torch.manual_seed(0)
    a, b = tower(), tower()
    x, z = torch.randn(4, 3, 4).double(), torch.randn(4, 3, 4).double()
    with packprop.backpack(BatchGrad()):
        F.mse_loss(a(x), b(z.transpose(0, 1)).transpose(0, 1)).backward()
    for n in range(4):
        term = F.mse_loss(a(x[n : n + 1]), b(z[n : n + 1])) / 4
        assert_near(b.weight.grad_batch[n], torch.autograd.grad(term, b.weight)[0], "row", 1e-10)


def test_a_contrastive_loss_of_ones_own_is_refused() -> None:
    class Contrastive(nn.Module):
        def forward(self, q: Tensor, d: Tensor) -> Tensor:
            scores = q @ d.T
            return (scores.logsumexp(1) - scores.diagonal()).mean()

    a, b, x, z = towers()
    loss = packprop.extend(Contrastive())
    with packprop.backpack(BatchGrad(), Variance()), pytest.raises(PackpropError, match="mixes the samples"):
        loss(a(x), b(z)).backward()
    with (
        packprop.clipped_gradients(max_norm=0.1, reduction="mean"),
        pytest.raises(PackpropError, match="mixes the samples"),
    ):
        loss(a(x), b(z)).backward()


def test_norms_of_clipping_count_both_towers() -> None:
    a, b, x, z = towers()
    with packprop.clipped_gradients(max_norm=0.5) as clipped:
        F.mse_loss(a(x)[ORDER], b(z)[ORDER]).backward()
    norms = []
    for n in ORDER.tolist():
        term = F.mse_loss(a(x[n : n + 1]), b(z[n : n + 1]))
        rows = torch.autograd.grad(term, [*a.parameters(), *b.parameters()])
        norms.append(torch.cat([row.flatten() for row in rows]).norm())
    assert_near(clipped.norms, torch.stack(norms), "norms", 1e-10)


@pytest.mark.parametrize("extended", [True, False])
def test_parameters_that_lead_to_a_target_alone_have_values(extended: bool) -> None:
    """A teacher that is trained, too, or learned centres of classes."""
    torch.manual_seed(0)
    student, teacher, centres = nn.Linear(4, 3), nn.Linear(4, 3), nn.Embedding(3, 3)
    if extended:
        packprop.extend(student)
    x, y = torch.randn(SAMPLES, 4), torch.arange(SAMPLES) % 3
    with packprop.backpack(BatchGrad()):
        (F.mse_loss(student(x), teacher(x)) + F.mse_loss(student(x), centres(y))).backward()
    for module in (student, teacher, centres):
        for parameter in module.parameters():
            assert_near(parameter.grad_batch.sum(0), parameter.grad, "sum", 1e-5)


def test_values_over_data_do_not_depend_on_the_split() -> None:
    a, _, x, _ = towers()

    def turned(f: Tensor, _: Tensor) -> Tensor:
        return F.mse_loss(f, f.flip(0))

    for size in (5, 2):
        with pytest.raises(PackpropError, match="the samples are mixed"):
            packprop.compute(a, turned, (x, ZEROS), SumGradSquared(), batch_size=size, progress=False)


class Gated(nn.Module):
    """Experts with a gate, which the module keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(3, 2), nn.Linear(3, 6)
        self.share = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.share = self.gate(x).softmax(1)
        return (self.experts(x).unflatten(1, (2, 3)) * self.share.unsqueeze(2)).sum(1)


class Balanced(nn.Module):
    """Reads what the model keeps: the share of each expert, of the batch or of each sample."""

    def __init__(self, model: Gated, of_batch: bool) -> None:
        super().__init__()
        self.of, self.of_batch = [model], of_batch

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        share = self.of[0].share
        balance = share.mean(0).square().sum() if self.of_batch else share.square().sum(1).mean()
        return (out.logsumexp(1) - out.gather(1, y[:, None])[:, 0]).mean() + 2 * balance


def gated(of_batch: bool) -> tuple[Gated, nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = packprop.extend(Gated().double())
    return model, packprop.extend(Balanced(model, of_batch)), torch.randn(4, 3).double(), torch.arange(4) % 3


def test_a_loss_that_reads_what_the_model_keeps() -> None:
    model, loss, x, y = gated(of_batch=False)
    with packprop.backpack(BatchGrad()):
        loss(model(x), y).backward()
    for parameter in model.parameters():
        rows = [
            torch.autograd.grad(loss(model(x[n : n + 1]), y[n : n + 1]) / 4, parameter)[0] for n in range(4)
        ]
        assert_near(parameter.grad_batch, torch.stack(rows), "rows", 1e-10)


def test_a_loss_that_reads_the_mean_of_what_the_model_keeps() -> None:
    model, loss, x, y = gated(of_batch=True)
    for asked in (BatchGrad(), BatchDiagHessian(), DiagGGNExact()):
        with packprop.backpack(asked), pytest.raises(PackpropError):
            loss(model(x), y).backward()
    with packprop.backpack(DiagHessian()):
        loss(model(x), y).backward()
    value = loss(model(x), y)
    for parameter in model.parameters():
        (gradient,) = torch.autograd.grad(value, parameter, create_graph=True)
        rows = [torch.autograd.grad(g, parameter, retain_graph=True)[0].flatten() for g in gradient.flatten()]
        assert_near(parameter.diag_h.flatten(), torch.stack(rows).diagonal(), "diagonal", 1e-9)


def test_a_loss_around_one_of_torch_is_told_how_to_be_written() -> None:
    class Squared(nn.Module):
        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(out, y, reduction="none").square().mean()

    model, _, x, _ = towers()
    with (
        packprop.backpack(DiagGGNExact()),
        pytest.raises(PackpropError, match="calls no loss function of torch"),
    ):
        packprop.extend(Squared())(model(x), torch.arange(SAMPLES) % 3).backward()


class Centred(nn.Module):
    """Has a centre that is no layer: a loss takes it as its target."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.centre = nn.Linear(5, 3), nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("of", [lambda c: c[0], lambda c: c.tanh()[:1]], ids=["row", "computed"])
def test_targets_of_parameters_alone_are_not_left_out(of: Callable[[Tensor], Tensor]) -> None:
    """A loss broadcasts them over the samples, which the graph does not tell from a penalty."""
    torch.manual_seed(0)
    model, x, y = Centred(), torch.randn(9, 5), torch.randn(9, 3)

    def loss(f: Tensor, _: Tensor) -> Tensor:
        return F.mse_loss(f, of(model.centre), reduction="sum")

    with pytest.raises(PackpropError, match="parameter 'centre'"):
        packprop.compute(model, loss, (x, y), SumGradSquared(), progress=False)
    with pytest.raises(PackpropError, match="parameter 'centre'"):
        packprop.influence((x, y), model, loss, (x[:2], y[:2]), k=9)
    with packprop.record(), packprop.backpack(BatchGrad()):  # rows for each sample, by the user
        F.mse_loss(model(x), of(model.centre).expand(9, 3)).backward()
    assert_near(model.centre.grad_batch.sum(0), model.centre.grad, "sum", 1e-5)


def test_arguments_without_the_positions_of_the_first() -> None:
    torch.manual_seed(0)
    a, b = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
    x, z = torch.randn(4, 6, 4).double(), torch.randn(4, 4).double()

    class Own(nn.Module):
        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            return ((out.view(-1, 6, 3) * target[:, None]) ** 2).sum()

    def check(value: Callable[[slice], Tensor], whole: slice = slice(None)) -> None:
        with packprop.record(sample_axis=None), packprop.backpack(BatchGrad()):
            value(whole).backward()
        for n in range(4):
            (row,) = torch.autograd.grad(value(slice(n, n + 1)), b.weight)
            assert_near(b.weight.grad_batch[n], row, "row", 1e-10)

    own = packprop.extend(Own())
    check(lambda n: own(a(x[n]).flatten(0, 1), b(z[n])))

    def aligned(n: slice) -> Tensor:
        with packprop.record(sample_axis=1):
            return F.mse_loss(a(x[n].transpose(0, 1)), b(z[n]), reduction="sum")

    check(aligned)
