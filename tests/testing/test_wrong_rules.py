"""Rules that are wrong are caught."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import wrap_torch_function

import packprop
from packprop.algebra.structures import Dense, Outer
from packprop.functions.building import affine, rowwise, scaled, select_samples
from packprop.functions.entry import Entry
from packprop.testing import CheckFailed, check_use
from tests.references.tensors import R, p
from tests.testing.registered import gate, gates


def right_factor(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.sigmoid() * (1 - weight.sigmoid())


def entry(structure_of: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for `gate` from what it makes of a product of cotangent and factor ``[v, n, p]``."""

    def rule(call: Any, x: Tensor, weight: Tensor) -> list[Entry]:
        def rows(cotangents: Any, where: Any, samples: Any) -> Dense:
            if cotangents[0] is None:
                return Dense(None)
            product = where[0].to_front(cotangents[0] * right_factor(x, weight), 1)
            rows = product.reshape(*product.shape[:2], -1, 4).sum(2)
            return Dense(structure_of(rows, samples))

        return [Entry(weight, "Dense", rows)]

    return rule


WRONG_RULES = {
    "factor": (
        lambda call, x, weight: [scaled(call, weight, lambda: x)],
        ("one sample at a time", "parameter 'weight'", "largest relative error"),
    ),
    "sums over columns": (
        entry(lambda product, samples: select_samples(product, samples, 1).sum(0, keepdim=True)),
        ("one sample at a time", "v=2", "shapes are [1, 1, 4] and [2, 1, 4]"),
    ),
    "ignores the choice": (
        entry(lambda product, samples: product),
        ("one sample at a time", "chosen [1]", "shapes are [1, 3, 4] and [1, 1, 4]"),
    ),
    "order of the choice": (
        entry(
            lambda product, samples: select_samples(
                product, samples if isinstance(samples, slice) else samples.sort().values, 1
            )
        ),
        ("one sample at a time", "chosen [2, 0]", "largest relative error"),
    ),
    "not differentiable": (
        lambda call, x, weight: [scaled(call, weight, lambda: right_factor(x, weight).detach())],
        ("in a model that calls it once: differentiable", "parameter 'weight'"),
    ),
    "no rows": (
        lambda call, x, weight: [Entry(weight, "Dense", lambda *_: Dense(None))],
        ("one sample at a time", "the structure has no rows"),
    ),
    "describes nothing": (
        lambda call, x, weight: None,
        ("the registered rule", "says nothing of parameter 'weight'"),
    ),
}


@pytest.mark.parametrize("name", WRONG_RULES)
def test_a_wrong_rule_is_caught(name: str) -> None:
    rule, texts = WRONG_RULES[name]
    packprop.register_use(gate)(rule)
    with pytest.raises(CheckFailed) as caught:
        check_use(gate, gates)
    for text in texts:
        assert text in str(caught.value)
    assert caught.value.error > 1e-3


def test_positions_folded_into_the_samples_are_tested() -> None:
    @packprop.register_use(gate)
    def rule(call, x, weight):
        def structure_of(cotangents, where, samples):  # right wherever each row is a sample
            if cotangents[0] is None:
                return Dense(None)
            return Dense(select_samples(cotangents[0] * right_factor(x, weight), samples, 1))

        return [Entry(weight, "Dense", structure_of)]

    with pytest.raises(CheckFailed, match="3 samples x 2 parts"):
        check_use(gate, gates)


@wrap_torch_function(lambda x, weight: (x, weight))
def symmetric(x: Tensor, weight: Tensor) -> Tensor:
    return x @ (weight + weight.T)


def test_a_fold_that_sums_breaks_fast_statistics() -> None:
    @packprop.register_use(symmetric)
    def rule(call, x, weight):
        def build(cotangent, x):
            if cotangent is not None:
                cotangent = cotangent.reshape(*cotangent.shape[:2], -1, 1, 3)
            inputs = x.reshape(x.shape[0], -1, 1, 3)
            return Outer(inputs, cotangent, lambda g: (g + g.mT).squeeze(-3))

        return [Entry(weight, "Outer", rowwise(build, "symmetric", x))]

    with pytest.raises(CheckFailed, match="fast statistics was compared") as caught:
        check_use(symmetric, lambda n: (R(n, 3), p(3, 3)))
    assert "sum_sq" in caught.value.where
    assert "rearrange" in caught.value.instead


def test_inputs_alone_are_tested() -> None:
    @packprop.register_use(F.linear)
    def rule(call, input, weight):
        right = affine(call, input, weight)

        def structure_of(cotangents, where, samples):
            structure = right.structure_of(cotangents, where, samples)
            if cotangents[0] is None:
                return Outer(2 * structure.x, None, structure.fold)
            return structure

        return [Entry(weight, "Outer", structure_of)]

    with pytest.raises(CheckFailed, match="inputs alone"):
        check_use(F.linear, lambda n: (R(n, 3), p(4, 3)))


def test_a_function_that_recording_does_not_see() -> None:
    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    packprop.register_use(plain)(lambda call, x, weight: [affine(call, x, weight)])
    with pytest.raises(CheckFailed, match="saw 'linear' in its place") as caught:
        check_use(plain, lambda n: (R(n, 3), p(4, 3)))
    assert "wrap_torch_function" in caught.value.instead
    report = check_use(plain, lambda n: (R(n, 3), p(4, 3)), allow_fallback=True)
    assert "recording sees 'linear' in place of 'plain'" in report.notes


def test_a_function_without_a_rule() -> None:
    with pytest.raises(CheckFailed, match="no rule is registered"):
        check_use(torch.logaddexp, lambda n: (R(n, 3), p(3)))


def test_a_function_that_mixes_samples() -> None:
    @wrap_torch_function(lambda x, weight: (x, weight))
    def mixing(x: Tensor, weight: Tensor) -> Tensor:
        return (x - x.mean(0)) * weight

    with pytest.raises(CheckFailed, match="samples are mixed"):
        check_use(mixing, gates, allow_fallback=True)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda n: (R(n, 3), R(3)), "no tensor is an nn.Parameter"),
        (lambda n: (R(2, 3), p(3)), "no tensor has extent n"),
        (lambda n: (R(n, n), p(n)), "on several axes"),
        (lambda n: ([R(1, 3)] * n, p(3)), "number of tensors depends"),
    ],
)
def test_arguments_that_are_none(make: Callable[[int], Any], text: str) -> None:
    with pytest.raises(packprop.BadInput, match=re.escape(text)):
        check_use(torch.mul, make)
