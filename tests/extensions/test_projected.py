"""Projected gradients are gradients times the documented matrix, whatever they are made of."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop.engine.algebra import projections
from packprop.engine.algebra.projections import Projection
from packprop.engine.algebra.structures import Lookup
from packprop.engine.passes.chunks import ChunkSizes
from packprop.errors import BadInput, PackpropError
from packprop.extensions import BatchGrad, BatchL2Grad, Projected, SumGradSquared, Variance
from tests.cases import CASES, Case
from tests.references.oracle import Problem
from tests.references.projections import matrix
from tests.references.running import assert_all_near, assert_near, backward, results
from tests.selection import each_structure, often, one_in, thorough

KINDS = ("rademacher", "gaussian", "kronecker")
PLAIN = [case for case in CASES if not case.refuses]


def expected_of(problem: Problem, kind: str, dimension: int, seed: int = 0) -> dict[str, Tensor]:
    """What `BatchGrad` has saved, times the documented matrices."""
    found = {}
    for name, gradients in results(problem, "grad_batch").items():
        made = matrix(kind, dimension, seed, name, tuple(gradients.shape[1:]))
        rows = gradients.reshape(len(gradients), gradients.shape[1:].numel())
        made = made.reshape(dimension, rows.shape[1]).to(rows.dtype)
        found[name] = rows @ made.T
    return found


@one_in(5)
@each_structure
@pytest.mark.covers("Projected")
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_gradients_times_the_documented_matrix(case: Case) -> None:
    size, reduction = case.sizes[-1], case.reductions[0]
    plain = case.problem(size, reduction)
    backward(plain, BatchGrad(), record=case.record)
    for kind in KINDS:
        problem = case.problem(size, reduction)
        backward(problem, Projected(BatchGrad(), 6, kind=kind), record=case.record)
        found = results(problem, "grad_batch_projected")
        assert_all_near(found, expected_of(plain, kind, 6), f"projection by {kind}", 1e-10)
        assert_all_near(
            {k: p.grad for k, p in problem.parameters.items()},
            {k: p.grad for k, p in plain.parameters.items()},
            "grad",
        )


class Words(nn.Module):
    """Embedding tied to the head or not, over positions; groups, transposed convolution, scalars."""

    def __init__(self, words: int = 30) -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(words, 4), nn.Embedding(3, 4)
        self.grouped, self.back = nn.Conv1d(4, 6, 3, groups=2), nn.ConvTranspose1d(6, 4, 2, groups=2)
        self.norm, self.scale = nn.LayerNorm([4]), nn.Parameter(torch.tensor(2.0))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.other(ids % 3)
        x = self.back(self.grouped(x.mT).tanh()).mT
        out: Tensor = (self.scale * self.norm(x)) @ self.table.weight.T
        return out.mT


@one_in(5)
@often(lambda kind, dimension, words, block: dimension == 7 or (words, block) == (300, 20))
@pytest.mark.parametrize("dimension", [1, 7, 64, 130])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("words", [5, 300])
@pytest.mark.parametrize("block", [None, 20])
def test_structures_in_blocks(
    kind: str, dimension: int, words: int, block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dimensions that are no whole words; many rows of a table and few; blocks of few entries, and chunks."""
    if block is not None:
        monkeypatch.setattr(projections, "BLOCK", block)
        monkeypatch.setattr(ChunkSizes, "samples_at_once", lambda *_: 2)
    torch.manual_seed(0)
    model, loss = packprop.extend(Words(words).double()), packprop.extend(nn.CrossEntropyLoss())
    ids, targets = torch.randint(words, (3, 6)), torch.randint(words, (3, 5))
    problem = Problem.of_batch(model, loss, ids, targets, 15)
    found = {}
    for extension in (Projected(BatchGrad(), dimension, kind=kind, seed=3), BatchGrad()):
        value = loss(model(ids), targets)
        with packprop.backpack(extension):
            value.backward()
        found[extension.savefield] = results(problem, extension.savefield)
    assert_all_near(found["grad_batch_projected"], expected_of(problem, kind, dimension, 3), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 2), (0, 3)], ids=str)
def test_the_matrix_is_the_documented_one(kind: Any, shape: tuple[int, ...]) -> None:
    made = Projected(BatchGrad(), 70, kind=kind, seed=5).matrix("a.b", shape, torch.float64)
    assert_near(made, matrix(kind, 70, 5, "a.b", shape), kind, 1e-14)
    assert_near(Projected(BatchGrad(), 70, kind=kind, seed=5).matrix("a.b", shape), made.float(), kind, 1e-6)


def test_matrices_do_not_change_between_versions() -> None:
    made = Projected(BatchGrad(), 8, seed=1).matrix("weight", (4,)) * math.sqrt(8)
    assert made.round().int().tolist()[:2] == [[-1, 1, -1, 1], [-1, 1, 1, -1]]
    assert Projected(BatchGrad(), 6).projection.sides == (2, 3)
    assert Projected(BatchGrad(), 4096).projection.sides == (64, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_has_the_same_matrices(kind: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = packprop.extend(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype))
    loss = packprop.extend(nn.CrossEntropyLoss())
    value = loss(model(torch.randn(6, 5).to(dtype)), torch.randint(3, (6,)))
    with packprop.backpack(Projected(BatchGrad(), 16, kind=kind), BatchGrad()):
        value.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad_batch_projected.dtype == torch.float32
        made = matrix(kind, 16, 0, name, tuple(parameter.shape)).flatten(1)
        expected = parameter.grad_batch.flatten(1).double() @ made.T
        assert_near(parameter.grad_batch_projected, expected.float(), name, 4 * torch.finfo(dtype).eps)


@one_in(3)
@pytest.mark.parametrize("kind", KINDS)
def test_inner_products_are_kept_in_expectation(kind: Any) -> None:
    """Over 400 seeds, the mean lies within five standard errors; so does its spread of what is documented."""
    torch.manual_seed(0)
    gradients = {"0.weight": torch.randn(4, 5, 6).double(), "0.bias": torch.randn(4, 5).double()}
    flat = torch.cat([rows.flatten(1) for rows in gradients.values()], 1)
    exact, seeds, dimension = flat @ flat.T, 400, 24
    found = torch.zeros(seeds, 4, 4).double()
    for seed in range(seeds):
        extension = Projected(BatchGrad(), dimension, kind=kind, seed=seed)
        rows = sum(
            rows.flatten(1) @ extension.matrix(name, rows.shape[1:], torch.float64).flatten(1).T
            for name, rows in gradients.items()
        )
        assert isinstance(rows, Tensor)
        found[seed] = rows @ rows.T
    norms = flat.square().sum(1)
    bound = ((torch.outer(norms, norms) + exact.square()) / dimension).sqrt()
    spread = found.std(0)
    assert ((found.mean(0) - exact).abs() <= 5 * spread / math.sqrt(seeds)).all()
    if kind == "kronecker":
        bound = bound * math.sqrt(dimension * (1 / 4 + 1 / 6 + 1 / 24))
    assert (spread <= 1.2 * bound).all()
    assert (spread >= 0.3 * bound).all()


@pytest.mark.parametrize("kind", KINDS)
def test_beside_others_and_for_some_samples(kind: Any) -> None:
    torch.manual_seed(0)
    model = packprop.extend(nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 3)).double())
    loss = packprop.extend(nn.CrossEntropyLoss())
    value = loss(model(torch.randn(4, 2, 3, 3).double()), torch.tensor([0, 1, 2, 1]))
    chosen = Projected(BatchGrad(subsampling=[3, 0]), 6, kind=kind)
    with packprop.backpack(chosen, BatchGrad(), Variance(), BatchL2Grad(), SumGradSquared()):
        value.backward()
    for name, parameter in model.named_parameters():
        made = matrix(kind, 6, 0, name, tuple(parameter.shape)).flatten(1)
        assert_near(parameter.grad_batch_projected, parameter.grad_batch[[3, 0]].flatten(1) @ made.T, name)


def test_results_can_be_differentiated() -> None:
    torch.manual_seed(0)
    model = packprop.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double())
    loss = packprop.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(4, 3).double(), torch.tensor([0, 1, 2, 1])
    found = []
    for extension in (Projected(BatchGrad(), 6, kind="kronecker"), BatchGrad()):
        value = loss(model(x), y)
        with packprop.backpack(extension):
            value.backward(create_graph=True)
        total: Any = 0
        for name, parameter in model.named_parameters():
            rows = getattr(parameter, extension.savefield).flatten(1)
            if extension.savefield == "grad_batch":
                rows = rows @ matrix("kronecker", 6, 0, name, tuple(parameter.shape)).flatten(1).T
            total = total + rows.square().sum()
        found.append(torch.autograd.grad(total, [*model.parameters()]))
        for parameter in model.parameters():
            parameter.grad = None
    for one, other in zip(*found, strict=True):
        assert_near(one, other, "second derivatives")


@thorough
def test_a_plan_knows_what_it_takes() -> None:
    model = nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 3))
    batch = torch.randn(8, 40), torch.randint(3, (8,))
    for kind in KINDS:
        asked = Projected(BatchGrad(), 64, kind=kind)  # type: ignore[arg-type]  # a str from a parameter list
        plan = packprop.plan(model, nn.CrossEntropyLoss(), batch, [asked], memory="10MiB")
        packprop.extend(model)
        loss = packprop.extend(nn.CrossEntropyLoss())
        value = loss(model(batch[0]), batch[1])
        model.zero_grad()
        with packprop.backpack(asked, memory=plan):
            value.backward()
        assert model[0].weight.grad_batch_projected.shape == (8, 64)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Projected(Variance(), 8), "per-sample gradients"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: Projected(BatchGrad(per="token"), 8), "per-sample gradients"),
        (lambda: Projected(8), "per-sample gradients"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: Projected(BatchGrad(), 0), "at least 1"),
        (lambda: Projected(BatchGrad(), 2.0), "at least 1"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: Projected(BatchGrad(), 8, kind="sparse"), "kind"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: Projected(BatchGrad(), 8, seed=None), "seed"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: Projected(BatchGrad(subsampling=[]), 8), "at least one sample"),
    ],
)
def test_bad_arguments(make: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        make()


def test_parameters_of_one_name_are_refused() -> None:
    """Their matrices would be one, and the sum of their projections no projection."""
    parts = [packprop.extend(nn.Linear(3, 3)), packprop.extend(nn.Linear(3, 3))]
    loss = packprop.extend(nn.CrossEntropyLoss())
    value = loss(parts[1](parts[0](torch.randn(4, 3))), torch.tensor([0, 1, 2, 1]))
    refused = pytest.raises(PackpropError, match="'weight', of which there are several")
    with refused, packprop.backpack(Projected(BatchGrad(), 8)):
        value.backward()


def test_indices_in_32_bits_count_entries_of_a_large_table() -> None:
    """The table has more entries than 32 bits count, and is not formed."""
    found = []
    for dtype in (torch.int32, torch.int64):
        index = torch.tensor([[2**29 + 1]], dtype=dtype)
        table = Lookup(index, torch.ones(1, 1, 1, 8), 2**30, torch.float32)
        found.append(projections.projected(table, Projection("rademacher", 4, 0), "table", (2**30, 8)))
    assert_near(*found, "table")
