"""Losses made of several loss functions: what `compute` gives is what one big batch would, or a refusal."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import PackpropError, PackpropWarning, backpack, extensions
from packprop.applications.dataset.loss_terms import TermWeights
from packprop.applications.dataset.state import MergedResults
from packprop.engine.functions.losses.description import LOSSES
from packprop.functions import Loss
from tests.dataset.small import EXACT, SIZE, compute
from tests.references.running import assert_all_near
from tests.selection import one_in

CUTS = [3, 1, SIZE - 4]


class Tasks(nn.Module):
    """A class and a place for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.place = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.kind(hidden), self.place(hidden)


class Weighted(nn.Module):
    """Weights that were learned, for the loss of each task."""

    def __init__(self, *, ignore: int = -100, of_place: str = "mean", of_kind: str = "mean") -> None:
        super().__init__()
        self.s = nn.Parameter(torch.tensor([0.3, -0.5]).double())
        self.of_kind = nn.CrossEntropyLoss(ignore_index=ignore, reduction=of_kind)
        self.of_place = nn.MSELoss(reduction=of_place)

    def forward(self, outputs: Any, targets: Any) -> Tensor:
        losses = [
            task(f, y) for task, f, y in zip((self.of_kind, self.of_place), outputs, targets, strict=True)
        ]
        return ((-self.s).exp() * torch.stack(losses) + self.s).sum()


class Quantized(nn.Module):
    """A code of the samples, whose loss it returns with that of what is made of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.codebook = nn.Linear(4, 3), nn.Linear(3, 4), nn.Embedding(5, 3)

    def distance(self, one: Tensor, other: Tensor) -> Tensor:
        return F.mse_loss(one, other)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.encoder(x)
        code = self.codebook(torch.cdist(z.detach(), self.codebook.weight.detach()).argmin(1))
        commitment = self.distance(z, code.detach()) + 0.25 * self.distance(code, z.detach())
        return {"loss": F.mse_loss(self.decoder(z + (code - z).detach()), x) + commitment}


class ByHand(Quantized):
    """The same loss as arithmetic."""

    def distance(self, one: Tensor, other: Tensor) -> Tensor:
        return (one - other).square().mean()


def batches() -> list[Any]:
    x, kinds, places = torch.randn(SIZE, 4).double(), torch.randint(3, (SIZE,)), torch.randn(SIZE, 2).double()
    parts = zip(x.split(CUTS), kinds.split(CUTS), places.split(CUTS), strict=True)
    return [(each, (kind, place)) for each, kind, place in parts]


def joined(data: list[Any]) -> list[Any]:
    x, targets = zip(*data, strict=True)
    return [(torch.cat(x), tuple(map(torch.cat, zip(*targets, strict=True))))]


@one_in(2)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_tasks_with_weights(reduction: str, compiled: bool) -> None:
    """Weights that a module which is not extended holds, or frozen ones."""
    model, weighted, data = Tasks().double(), Weighted(of_kind=reduction, of_place=reduction), batches()
    (whole,) = joined(data)
    for loss in (lambda f, y: weighted(f, y), Weighted(of_kind=reduction, of_place=reduction)):
        if isinstance(loss, nn.Module):
            loss.requires_grad_(False)
        asked = [make() for make in EXACT]
        found = compute(model, loss, data, *asked, compiled=compiled)
        packprop.extend(model)
        value = weighted(model(whole[0]), whole[1])
        with backpack(*asked):
            value.backward()
        if reduction == "mean":
            assert found.loss == pytest.approx(value.item())
        for extension in asked:
            own = extension.savefield
            expected = {name: getattr(parameter, own) for name, parameter in model.named_parameters()}
            assert_all_near(found[extension], expected, own)


def test_a_model_that_returns_a_sum_of_losses() -> None:
    """The commitment loss of a codebook beside that of the reconstruction."""
    model, x = Quantized().double(), torch.randn(SIZE, 4).double()
    asked = [extensions.BatchL2Grad(), extensions.Variance(), extensions.DiagGGNExact()]
    found = compute(model, None, [{"x": part} for part in x.split(CUTS)], *asked)
    whole = compute(model, None, [{"x": x}], *asked)
    single = [torch.autograd.grad(model(row[None])["loss"], [*model.parameters()]) for row in x]
    norms = torch.stack([sum(each.square().sum() for each in row).sqrt() for row in single])  # type: ignore[union-attr]  # tensors
    torch.testing.assert_close(found.norms(), norms)
    for extension in asked:
        assert_all_near(found[extension], whole[extension], extension.savefield)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_that_is_divided_by_the_size_of_the_batch(compiled: bool) -> None:
    """Distillation: a student is told classes, and the outputs of its teacher."""

    def loss(scores: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        kind, taught = targets
        apart = F.kl_div(scores.log_softmax(1), taught.softmax(1), reduction="batchmean")
        return F.cross_entropy(scores, kind) + 0.5 * apart

    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    given = torch.randn(SIZE, 4).double(), (torch.randint(3, (SIZE,)), torch.randn(SIZE, 3).double())
    parts = zip(given[0].split(CUTS), *(each.split(CUTS) for each in given[1]), strict=True)
    asked = [extension() for extension in EXACT]
    found = compute(model, loss, [(x, (y, t)) for x, y, t in parts], *asked, compiled=compiled)
    whole = compute(model, loss, [given], *asked)
    assert found.loss == pytest.approx(whole.loss, rel=1e-12)
    for extension in asked:
        assert_all_near(found[extension], whole[extension], extension.savefield)


def test_a_divisor_that_counts_steps() -> None:
    """Where time comes first, ``batchmean`` divides by the number of steps, the same in all batches."""
    model, data = packprop.extend(nn.Linear(4, 3), sample_axis=1), torch.randn(5, 2, 4)

    def loss(scores: Tensor, taught: Tensor) -> Tensor:
        return F.kl_div(scores.log_softmax(2), taught.softmax(2), reduction="batchmean")

    with pytest.raises(PackpropError, match="what it is divided by is not known"):
        compute(model, loss, [(data, data[..., :3])] * 2, extensions.SumGradSquared())


def test_products_with_a_matrix_of_the_data() -> None:
    model, data = Tasks().double(), batches()
    weighted = Weighted().requires_grad_(False)
    vector = torch.randn(sum(parameter.numel() for parameter in model.parameters())).double()
    one, other = (packprop.operators.of_data(model, weighted, each) for each in (data, joined(data)))
    torch.testing.assert_close(one @ vector, other @ vector)


def ignoring(data: list[Any]) -> list[Any]:
    data[0][1][0][0] = -100
    return data


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "ignored targets": (Weighted, "some samples count more than others", "reduction='sum'"),
    "a mean and a sum": (lambda: Weighted(of_place="sum"), "mse_loss \\(sum\\)", "the same reduction"),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_batches_have_no_weight_in(name: str, compiled: bool) -> None:
    make, said, instead = REFUSED[name]
    with pytest.raises(PackpropError, match=said) as error:
        compute(
            Tasks().double(),
            make().requires_grad_(False),
            ignoring(batches()),
            extensions.Variance(),
            compiled=compiled,
        )
    assert instead in error.value.instead
    both = Weighted(of_kind="sum", of_place="sum").requires_grad_(False)
    compute(Tasks().double(), both, ignoring(batches()), extensions.Variance())


def test_weights_of_an_extended_loss_are_refused_with_two_ways_out() -> None:
    with pytest.raises(PackpropError, match="parameter 's'") as error:
        compute(Tasks().double(), Weighted(), batches(), extensions.Variance())
    assert "keep it in a module that you do not extend" in error.value.instead
    assert "requires_grad=False" in error.value.instead


def test_a_part_that_is_no_loss_of_torch() -> None:
    with pytest.raises(PackpropError, match="part of which no loss function makes") as error:
        compute(ByHand().double(), None, [{"x": torch.randn(4, 4).double()}], extensions.Variance())
    assert "F.mse_loss(a, b) for (a - b).square().mean()" in error.value.instead


class Fourth(nn.Module):
    """A loss of ones own."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).pow(4).mean()


class Told(Fourth):
    """The same with an attribute that loss modules of torch have, too."""

    reduction = "mean"


@pytest.fixture
def registered() -> Iterator[None]:
    @packprop.register_loss(Fourth, Told)
    def rule(outputs: Tensor, targets: Tensor) -> Loss:
        return Loss(class_axis=None, weight=1.0, divisor=outputs.numel(), root=None)

    yield
    LOSSES.pop(Fourth)
    LOSSES.pop(Told)


@pytest.mark.usefixtures("registered")
def test_a_loss_module_of_ones_own() -> None:
    """The advice, followed: a batch of one number has a reduction by its attribute alone."""
    model, x, y = nn.Linear(4, 1).double(), torch.randn(SIZE, 4).double(), torch.randn(SIZE, 1).double()
    asked = [make() for make in EXACT]
    data = list(zip(x.split(CUTS), y.split(CUTS), strict=True))
    with pytest.raises(PackpropError, match="the loss Fourth") as error:
        compute(model, Fourth(), data, *asked)
    assert "an attribute reduction='mean' or 'sum'" in error.value.instead
    found, whole = compute(model, Told(), data, *asked), compute(model, Fourth(), (x, y), *asked)
    for extension in asked:
        assert_all_near(found[extension], whole[extension], extension.savefield)


def test_a_loss_module_without_a_rule() -> None:
    with pytest.raises(PackpropError, match="the loss Fourth") as error:
        compute(nn.Linear(4, 2), Fourth(), (torch.randn(3, 4), torch.randn(3, 2)), extensions.Variance())
    assert "@packprop.register_loss(MyLoss)" in error.value.instead


def test_batches_of_inputs_alone_are_a_list() -> None:
    """A tuple of tensors holds all samples, an argument of the model each."""
    given = torch.randn(4, 4), torch.randn(3, 4)
    found = compute(Quantized(), None, [*given], extensions.Variance())
    assert found.samples == 7
    with pytest.raises(PackpropError, match="dictionaries of the model's arguments"):
        compute(Quantized(), None, given, extensions.Variance())


def by_size(model: nn.Module, f: Tensor) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum() / len(f)


def by_data(model: nn.Module, f: Tensor) -> Tensor:
    return f.detach().square().mean() * by_size(model, f[:1])


def in_some(model: nn.Module, f: Tensor) -> Tensor:
    return by_size(model, f[:1]) if len(f) == 2 else f.new_zeros(())


@pytest.mark.parametrize("penalty", [by_size, by_data, in_some])
def test_penalties_that_differ_between_batches(penalty: Callable[[nn.Module, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    data = torch.randn(SIZE, 4).double(), torch.randn(SIZE, 2).double()

    def loss(f: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(f, y) + penalty(model, f)

    def found(asked: Any, batch_size: int = 2) -> packprop.Result:
        return packprop.compute(model, loss, data, asked, batch_size=batch_size, progress=False)

    found(extensions.DiagHessian(), SIZE)
    for asked in (extensions.DiagHessian(), extensions.DiagHessianMC()):
        with pytest.raises(PackpropError, match=r"a penalty that is added to a mean\n.*in another batch"):
            found(asked)
    product = packprop.operators.of_data(model, loss, data, matrix="hessian", batch_size=2)
    with pytest.raises(PackpropError, match="a penalty that is added to a mean"):
        product @ torch.ones(product.shape[1]).double()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        norms = found(extensions.BatchL2Grad())["batch_l2"]
    assert [w.category for w in said if "depends on the split" in str(w.message)] == [PackpropWarning]
    plain = packprop.compute(model, nn.MSELoss(), data, extensions.BatchL2Grad(), progress=False)["batch_l2"]
    assert_all_near(norms, plain, "norms", 1e-10)


def test_penalties_are_mentioned_once_in_a_continued_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    batches = [(torch.randn(2, 4).double(), torch.randn(2, 2).double()) for _ in range(6)]
    fails = [3]

    def loss(f: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(f, y) + by_data(model, f)

    def read() -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if [number] == fails:
                raise OSError("gone")
            yield batch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(PackpropError, match="gone"):
            compute(model, loss, read(), extensions.BatchL2Grad(), checkpoint=tmp_path, every=1)
        fails.clear()
        compute(model, loss, read(), extensions.BatchL2Grad(), checkpoint=tmp_path, every=1)
    assert sum("depends on the split" in str(each.message) for each in said) == 1


def test_weights_of_terms_are_kept_whole() -> None:
    before, after = MergedResults([]), MergedResults([])
    before.weights = TermWeights({"terms": [1.0]}, {"terms": [2.0]}, 0.1, True, True)
    after.restore(before.saved())
    assert after.weights == before.weights


@pytest.mark.parametrize("size", [None, 2])
def test_a_loss_that_takes_no_sample_more_is_mentioned(size: int | None) -> None:
    """Nothing tells then whether the division by the size of the batch stands for the split into batches."""
    model = nn.Linear(4, 3).double()
    data = torch.randn(6, 4).double(), torch.randint(3, (6,))
    offsets = torch.zeros(size or 6, 1).double()

    def loss(f: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(f + offsets, y, reduction="sum") / len(y)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compute(model, loss, data, extensions.BatchL2Grad(), batch_size=size)
    found = ["computed with its last sample repeated (RuntimeError: " in str(each.message) for each in said]
    assert found == ([True] if size else [])  # one batch is not split


def test_one_penalty_in_all_batches_is_not_mentioned() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    data = torch.randn(SIZE, 4), torch.randn(SIZE, 2)
    called: list[Tensor] = []

    def loss(f: Tensor, y: Tensor) -> Tensor:
        penalty = torch.stack([p.abs().sum() for p in model.parameters()]).sum()
        penalty.register_hook(called.append)
        return F.mse_loss(f, y) + 1e-4 * penalty

    for kind in (torch.float32, torch.bfloat16):
        given = tuple(each.to(kind) for each in data)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            packprop.compute(
                model.to(kind), loss, given, extensions.DiagHessian(), batch_size=3, progress=False
            )
    assert not called


def test_a_penalty_beside_a_sum_is_mentioned_once() -> None:
    model = nn.Linear(4, 2)
    data = torch.randn(6, 4), torch.randn(6, 2)

    def loss(f: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(f, y, reduction="sum") + model.weight.square().sum()

    for _ in range(2):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            packprop.compute(model, loss, data, extensions.BatchL2Grad(), batch_size=1, progress=False)
        assert sum("counts it once for each batch" in str(each.message) for each in said) == 1


def test_a_penalty_beside_a_sum_counts_once_or_is_refused() -> None:
    """Each batch would add it once more; under a mean, batches have weights that sum to one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    data = torch.randn(SIZE, 4).double(), torch.randn(SIZE, 2).double()

    def penalised(reduction: str) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(f: Tensor, y: Tensor) -> Tensor:
            penalty = sum(p.square().sum() for p in model.parameters())
            return F.mse_loss(f, y, reduction=reduction) + 0.1 * penalty

        return loss

    def found(reduction: str, size: int) -> packprop.Result:
        asked = extensions.DiagHessian()
        return packprop.compute(model, penalised(reduction), data, asked, batch_size=size, progress=False)

    whole, parts = found("mean", SIZE), found("mean", 2)
    assert parts.loss == pytest.approx(whole.loss)
    assert_all_near(parts["diag_h"], whole["diag_h"], "mean", 1e-10)
    found("sum", SIZE)
    with pytest.raises(PackpropError, match="penalty that is added to a sum"):
        found("sum", 2)
    for size in (SIZE, 2):
        product = packprop.operators.of_data(model, penalised("sum"), data, matrix="hessian", batch_size=size)
        with (
            nullcontext()
            if size == SIZE
            else pytest.raises(PackpropError, match="penalty that is added to a sum")
        ):
            for _ in range(2):
                product @ torch.ones(product.shape[1]).double()
    asked = extensions.BatchL2Grad()
    with pytest.warns(PackpropWarning, match="counts it once for each batch"):
        found_norms = packprop.compute(model, penalised("sum"), data, asked, batch_size=2, progress=False)
    plain = packprop.compute(model, nn.MSELoss(reduction="sum"), data, asked, progress=False)
    torch.testing.assert_close(found_norms.norms(), plain.norms())
