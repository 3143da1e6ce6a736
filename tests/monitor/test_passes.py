"""What a monitored pass computes along: for every structure, and however many samples are taken at once."""

from __future__ import annotations

import pytest
import torch

import packprop
from packprop.engine.algebra import structures
from packprop.engine.functions.rules import convolution
from packprop.engine.passes import chunks
from packprop.engine.passes.chunks import ChunkSizes
from packprop.monitor.passes import GradientAndNorms
from tests.cases import CASES, ONE_OF_EACH, Case
from tests.references.running import assert_all_near, backward, reference, results
from tests.selection import often, one_in

CONVOLUTIONS = [case for case in CASES if case.name.startswith("conv") and case not in ONE_OF_EACH]


@one_in(3)
@often(lambda case, at_once, room: at_once == 2 and room == 0 and case in ONE_OF_EACH)
@pytest.mark.parametrize(("at_once", "room"), [(2, 2**20), (2, 0), (None, 0)], ids=["kept", "again", "whole"])
@pytest.mark.parametrize("case", [*ONE_OF_EACH, *CONVOLUTIONS], ids=lambda case: case.name)
def test_the_gradient_norms_and_products(
    case: Case, at_once: int | None, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one chunk; in several, with gradients of samples that wait for the second pass, or are not kept."""
    monkeypatch.setattr(chunks, "COTANGENTS", room)
    if at_once is not None:
        monkeypatch.setattr(ChunkSizes, "samples_at_once", lambda *_: at_once)
    size, reduction = case.sizes[-1], case.reductions[0]
    problem, rows = case.problem(size, reduction), reference(case.name, size, reduction).grad_batch
    backward(problem, GradientAndNorms(), record=case.record)
    found = results(problem, GradientAndNorms.savefield)
    for name, (gradient, squares, products) in found.items():
        flat = rows[name].flatten(1)
        total = flat.sum(0)
        right = {"gradient": rows[name].sum(0), "squares": flat.square().sum(1), "products": flat @ total}
        computed = {"gradient": gradient, "squares": squares, "products": products}
        assert_all_near(computed, right, name, 1e-10)


def test_convolutions_unfold_no_images_for_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The direction is convolved instead: it is a weight."""
    made = []

    def noted(*arguments: object, **options: object) -> torch.Tensor:
        made.append(arguments)
        return patches(*arguments, **options)  # type: ignore[arg-type]  # handed on as they come

    patches = convolution.patches
    monkeypatch.setattr(convolution, "patches", noted)
    monkeypatch.setattr(ChunkSizes, "samples_at_once", lambda *_: 2)
    monkeypatch.setattr(chunks, "COTANGENTS", 0)
    problem = next(case for case in ONE_OF_EACH if case.name == "conv2d").problem(4)
    counts = []
    for products in (False, True):
        made.clear()
        backward(problem, GradientAndNorms(products))
        counts.append(len(made))
    assert counts[0] == counts[1] > 0


def test_gradients_of_samples_are_formed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they take no more room than cotangents may, the second pass reads them again."""
    formed = []

    def noted(*arguments: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        formed.append(len(arguments[0]))
        return outer_products(*arguments, **options)

    outer_products = structures.outer_products
    monkeypatch.setattr(structures, "outer_products", noted)
    monkeypatch.setattr(ChunkSizes, "samples_at_once", lambda *_: 2)
    convolved: list[int] = []
    monkeypatch.setattr(
        convolution.Geometry, "inner_products", lambda *_: convolved.append(1) or torch.zeros(2).double()
    )
    for room, calls in ((2**20, 0), (0, 2)):
        formed.clear()
        monkeypatch.setattr(chunks, "COTANGENTS", room)
        model = torch.nn.Sequential(torch.nn.Conv1d(2, 2, 2), torch.nn.Flatten()).double()
        packprop.extend(model)
        loss = packprop.extend(torch.nn.CrossEntropyLoss())
        with packprop.backpack(GradientAndNorms()):
            loss(model(torch.randn(4, 2, 9).double()), torch.zeros(4).long()).backward()
        assert sum(formed) == 4
        assert len(convolved) == calls
