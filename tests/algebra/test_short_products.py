"""Products of sixteen bits with sums of single precision, as an accelerator computes them, tried on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.algebra import cells, kernels, statistics
from packprop.engine.algebra.structures import Outer
from packprop.engine.functions import building
from packprop.engine.tensors import tensors_in
from packprop.engine.tensors.device import multiplies_wide
from packprop.engine.tensors.dry import dry_run
from tests.selection import thorough


class Tied(nn.Module):
    """A head tied to its embedding, behind a layer that positions share and one that they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 12)
        self.shared, self.alone = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, index: Tensor) -> Tensor:
        h = torch.tanh(self.shared(self.words(index)))
        h = h + self.alone(h.mean(1))[:, None]
        return F.linear(h, self.words.weight).mT


@contextlib.contextmanager
def short_products() -> Iterator[list[torch.dtype]]:
    """Keep sixteen bits where a GPU would; yields the precisions that were multiplied."""
    seen: list[torch.dtype] = []

    def tell(tensor: Tensor) -> bool:
        return tensor.dtype in (torch.bfloat16, torch.float16)

    def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        assert left.dtype == right.dtype
        seen.append(left.dtype)
        return torch.matmul(left.float(), right.float(), out=out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "multiplies_wide", tell)
        patch.setattr(cells, "multiplies_wide", tell)
        for module in (kernels, cells, statistics):
            patch.setattr(module, "wide_product", product)
        yield seen


ASKED: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance", "BatchDotGrad")},
    **{name: {} for name in ("DiagGGNExact", "BatchDiagGGNExact", "KFLR")},
    "KFAC": {"approximation": "expand"},
    "EKFAC": {"mc_samples": 16},
}


def saved(extension: str, dtype: torch.dtype) -> list[Tensor]:
    """Return what an extension saves, as a list of tensors."""
    torch.manual_seed(0)
    model, loss = packprop.extend(Tied().to(dtype)), packprop.extend(nn.CrossEntropyLoss())
    index = torch.randint(7, (5, 9))
    options = ASKED[extension]
    if extension in ("KFAC", "EKFAC"):
        options = {**options, "generator": torch.Generator().manual_seed(1)}
    asked = getattr(extensions, extension)(**options)
    with packprop.backpack(asked):
        loss(model(index), index.flip(1)).backward()
    return [each for p in model.parameters() for each in tensors_in(getattr(p, asked.savefield))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("extension", ASKED)
def test_values_are_those_of_single_precision(extension: str, dtype: torch.dtype) -> None:
    expected = saved(extension, dtype)
    with short_products() as seen:
        found = saved(extension, dtype)
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
    assert dtype in seen


def test_clipped_gradients_are_rounded_as_those_of_a_plain_pass() -> None:
    def clipped() -> list[Tensor]:
        torch.manual_seed(0)
        model, loss = packprop.extend(Tied().bfloat16()), packprop.extend(nn.CrossEntropyLoss())
        index = torch.randint(7, (5, 9))
        with packprop.clipped_gradients(max_norm=0.05):
            loss(model(index), index.flip(1)).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = clipped()
    with short_products() as seen:
        found = clipped()
    assert torch.bfloat16 in seen
    for mine, other in zip(found, expected, strict=True):
        bound = 2**-8 * float(other.abs().max())
        torch.testing.assert_close(mine.float(), other.float(), rtol=0.02, atol=bound)


@thorough
def test_a_traced_step_multiplies_sixteen_bits() -> None:
    index = torch.randint(7, (5, 9))

    def norms() -> list[Tensor]:
        torch.manual_seed(0)
        model = packprop.extend(Tied().bfloat16())
        step = packprop.compile(model, packprop.extend(nn.CrossEntropyLoss()), extensions.BatchL2Grad())
        for _ in range(3):
            step(index, index.flip(1))
        return [p.batch_l2 for p in model.parameters()]  # type: ignore[attr-defined]  # saved

    expected = norms()
    with short_products() as seen:
        found = norms()
    assert torch.bfloat16 in seen
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_a_plan_for_a_gpu_multiplies_sixteen_bits() -> None:
    given = torch.empty(3, 4, 1, 5, device="meta", dtype=torch.bfloat16)
    cotangent = torch.empty(2, 3, 4, 1, 6, device="meta", dtype=torch.bfloat16)
    structure = Outer(given, cotangent, lambda matrix: matrix)
    with dry_run("cuda"):
        assert structure.rows is not None
        assert structure.rows.dtype == torch.float32
        assert "x" not in vars(structure)  # no copy in single precision
        assert "wide_cotangent" not in vars(structure)
        assert multiplies_wide(given)
        assert not multiplies_wide(given.float())
    with dry_run("cpu"):
        assert not multiplies_wide(given)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_sums_in_single_precision(dtype: torch.dtype) -> None:
    left = torch.randn(3, 7, 4096, device="cuda").to(dtype)
    right = torch.randn(3, 5, 4096, device="cuda").to(dtype)
    expected = torch.bmm(left.double(), right.double().mT).float()
    out = torch.empty(3, 7, 5, device="cuda")
    for found in (kernels.wide_product(left, right.mT), kernels.wide_product(left, right.mT, out)):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert out.equal(found)
