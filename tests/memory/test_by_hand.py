"""Saving memory by hand: outputs in chunks, fewer parameters, fewer samples, results freed as they come."""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from benchmarks.tracked import size_of
from packprop import extensions
from packprop.engine.memory.live import LiveBytes
from packprop.engine.passes import chunks
from tests.references.oracle import Oracle, Problem
from tests.references.running import ROWS, Row, as_tensors, assert_all_near, generator
from tests.selection import one_in, thorough

SIDE, SAMPLES = 8, 3


class Slicing(nn.Module):
    """A slice of its input."""

    def __init__(self, taken: tuple[slice, ...]) -> None:
        super().__init__()
        self.taken = taken

    def forward(self, x: Tensor) -> Tensor:
        return x[self.taken]


def auto_encoder() -> nn.Sequential:
    """An auto-encoder: convolutions down to a bottleneck, transposed ones up to 64 outputs, flattened."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2, padding=1),
        nn.Sigmoid(),
        nn.Conv2d(3, 2, 3, stride=2, padding=1),
        nn.Sigmoid(),
        nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1),
        nn.Sigmoid(),
        nn.ConvTranspose2d(3, 1, 3, stride=2, padding=1, output_padding=1),
        nn.Flatten(),
    ).double()


def images() -> Tensor:
    torch.manual_seed(1)
    return torch.rand(SAMPLES, 1, SIDE, SIDE, dtype=torch.float64)


def in_chunks(model: nn.Module, chunks: int) -> dict[str, Tensor]:
    """The GGN diagonal of the reconstruction error, one backward pass for each chunk of the outputs."""
    loss, x = packprop.extend(nn.MSELoss()), images()
    reconstruction = packprop.extend(model)(x)
    size = SIDE * SIDE // chunks
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    for chunk in range(chunks):
        taken = (slice(None), slice(chunk * size, (chunk + 1) * size))
        error = loss(packprop.extend(Slicing(taken))(reconstruction), x.flatten(1)[taken])
        with packprop.backpack(extensions.DiagGGNExact(), retain_graph=True):
            error.backward(retain_graph=True)
        for name in total:
            total[name] += model.get_parameter(name).diag_ggn_exact
    return {name: value / chunks for name, value in total.items()}  # each chunk's mean is over fewer entries


def oracle(model: nn.Module) -> Oracle:
    x = images()
    return Oracle(
        Problem(
            model,
            nn.MSELoss(),
            x,
            x,
            SAMPLES,
            total=lambda: nn.functional.mse_loss(model(x), x.flatten(1)),
            output=lambda n: model(x[n : n + 1]),
            term=lambda f, n: nn.functional.mse_loss(f, x[n : n + 1].flatten(1)) / SAMPLES,
        )
    )


@thorough
def test_outputs_in_chunks() -> None:
    """1, 4, 16 and 64 chunks through one retained graph: equal to each other, and to one pass."""
    expected = oracle(auto_encoder()).diag_ggn_exact
    model, x = packprop.extend(auto_encoder()), images()
    with packprop.backpack(extensions.DiagGGNExact()):
        packprop.extend(nn.MSELoss())(model(x), x.flatten(1)).backward()
    assert_all_near({n: p.diag_ggn_exact for n, p in model.named_parameters()}, expected, "one pass")
    for count in (1, 4, 16, 64):
        assert_all_near(in_chunks(auto_encoder(), count), expected, f"{count} chunks")


def test_fewer_parameters() -> None:
    """Parameters with ``requires_grad=False`` get nothing; the others get the same as before."""
    model = auto_encoder()
    expected = oracle(auto_encoder()).diag_ggn_exact
    frozen = [name for name, _ in model.named_parameters()][:2]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    found = in_chunks(model, 4)
    assert_all_near(found, {n: v for n, v in expected.items() if n not in frozen}, "the rest")
    for name in frozen:
        assert not hasattr(model.get_parameter(name), "diag_ggn_exact")


def measured(row: Row, hook: Any = None, frozen: int = 0) -> tuple[int, int]:
    """Tracked peak of a backward pass, and bytes of its results."""
    torch.manual_seed(0)
    model = packprop.extend(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))))
    for layer in list(model)[:frozen]:
        layer.requires_grad_(False)
    x, y = torch.randn(32, 64), torch.randint(64, (32,))
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    # Several draws are swept one after the other: results of all layers would wait for the last.
    options = {"mc_samples": 1} if row.sampled else {}
    with LiveBytes() as counted, packprop.backpack(row(generator(), **options), extension_hook=hook):
        loss.backward()
    values = [getattr(p, row.attribute, None) for p in model.parameters()]
    return counted.peak, size_of([value for value in values if value is not None])


LARGE = [row for row in ROWS if row.attribute in ("grad_batch", "diag_ggn_mc_batch", "sqrt_ggn_mc")]


@one_in(3)
@pytest.mark.parametrize("row", LARGE, ids=lambda row: row.name)
def test_an_extension_hook_that_frees_lowers_the_peak(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hook that frees them, per-sample results exist for one layer at a time."""
    monkeypatch.setattr(chunks, "SCRATCH", 2**18)
    sums: dict[nn.Module, list[Tensor]] = {}

    def reduce(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            values = as_tensors(getattr(parameter, row.attribute))
            sums.setdefault(module, []).extend(value.sum() for value in values)
            delattr(parameter, row.attribute)

    kept, results = measured(row)
    freed, nothing = measured(row, reduce)
    assert nothing == 0
    assert len(sums) == 8
    assert kept > results
    # one layer of eight, beside what the pass itself takes
    assert freed < kept - results / 2


@one_in(3)
@pytest.mark.parametrize("row", LARGE, ids=lambda row: row.name)
def test_fewer_parameters_lower_the_peak(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "SCRATCH", 2**18)
    peaks = [measured(row, frozen=frozen) for frozen in (0, 4, 7)]
    for (larger, of_larger), (smaller, of_smaller) in pairwise(peaks):
        assert larger - smaller > 0.9 * (of_larger - of_smaller) > 0


def test_fewer_samples_lower_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "SCRATCH", 2**18)

    def peak(kept: list[int] | None) -> int:
        model = packprop.extend(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
        loss = packprop.extend(nn.CrossEntropyLoss())(model(torch.randn(32, 64)), torch.randint(64, (32,)))
        with LiveBytes() as counted, packprop.backpack(extensions.BatchGrad(subsampling=kept)):
            loss.backward()
        return counted.peak

    whole = 4 * 32 * (64 * 64 + 64) * 4
    assert peak(None) - peak([3, 1]) > 0.9 * whole * 30 / 32


@pytest.mark.parametrize("chunks", [1, 4])
def test_subsampling_in_chunks(chunks: int) -> None:
    """Some samples, by chunks of the outputs: at the scale of the full batch."""
    model, x = packprop.extend(auto_encoder()), images()
    reconstruction, loss = model(x), packprop.extend(nn.MSELoss())
    size = SIDE * SIDE // chunks
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for chunk in range(chunks):
        taken = (slice(None), slice(chunk * size, (chunk + 1) * size))
        error = loss(packprop.extend(Slicing(taken))(reconstruction), x.flatten(1)[taken])
        with packprop.backpack(extensions.DiagGGNExact(subsampling=[2, 0])):
            error.backward(retain_graph=True)
        for name, parameter in model.named_parameters():
            total[name] += parameter.diag_ggn_exact / chunks
    expected = {n: v[[2, 0]].sum(0) for n, v in oracle(auto_encoder()).diag_ggn_exact_batch.items()}
    assert_all_near(total, expected, "two samples")


@pytest.mark.parametrize("asked", [(), (extensions.BatchL2Grad(),), (extensions.DiagGGNMC(),)], ids=str)
def test_outputs_of_the_model_do_not_outlive_their_loss(asked: tuple[Any, ...]) -> None:
    """Logits are the largest tensors of a language model: they are gone when the first layer is reached."""
    model = packprop.extend(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 50)))
    made: list[weakref.ref[Tensor]] = []
    model.register_forward_hook(lambda module, given, output: made.append(weakref.ref(output)))
    there: list[bool] = []
    model[0].weight.register_hook(lambda gradient: there.append(made[0]() is not None))
    loss = packprop.extend(nn.CrossEntropyLoss())(model(torch.randn(5, 4)), torch.randint(50, (5,)))
    with packprop.backpack(*asked):
        loss.backward()
    assert there == [False]
