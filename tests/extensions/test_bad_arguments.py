"""Arguments that are refused before any work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import packprop
from packprop import extensions
from packprop.types import Extension
from tests.cases.models.wrapping import Raw
from tests.references.refusals import batch, check, each_row, network, refused
from tests.references.running import ROWS, Row


@each_row
def test_a_class_instead_of_an_extension(row: Row) -> None:
    with pytest.raises(ValueError, match=row.name) as caught:
        packprop.backpack(row.make)
    check(caught.value, row.name, f"{row.name}()")


@pytest.mark.parametrize(
    "wrong",
    ["BatchGrad", None, 3, nn.Linear(1, 1), object()],
    ids=lambda value: type(value).__name__,
)
def test_something_that_is_no_extension(wrong: Any) -> None:
    with pytest.raises(ValueError, match="extension") as caught:
        packprop.backpack(extensions.BatchGrad(), wrong)
    check(caught.value, type(wrong).__name__)


def test_an_extension_without_a_hash() -> None:
    @dataclass
    class Mine(Extension):
        factor: float = 2.0

    with pytest.raises(ValueError, match="Mine") as caught:
        packprop.backpack(Mine())
    check(caught.value, "Mine", "frozen=True")


@pytest.mark.parametrize("name", ["grad", "data", "shape", ""])
def test_attributes_that_every_tensor_has(name: str) -> None:
    class Own(extensions.BatchGrad):
        savefield = name

    for extension in (Own(), extensions.HMP(savefield=name)):
        with pytest.raises(ValueError, match="savefield") as caught:
            packprop.backpack(extension)
        check(caught.value, extension.name, repr(name))


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (nn.Linear, "Linear"),
        (nn.CrossEntropyLoss, "CrossEntropyLoss()"),
        (F.cross_entropy, "record"),
        ("model", "str"),
        (None, "NoneType"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_extending_what_is_no_module(wrong: Any, word: str) -> None:
    with pytest.raises(ValueError, match="extend") as caught:
        packprop.extend(wrong)
    check(caught.value, word)


@pytest.mark.parametrize("draws", [0, -1, 1.5, "3", None], ids=repr)
@pytest.mark.parametrize("row", [r for r in ROWS if r.sampled], ids=lambda row: row.name)
def test_numbers_of_draws_that_are_none(row: Row, draws: Any) -> None:
    with pytest.raises(ValueError, match="mc_samples") as caught:
        row.make(mc_samples=draws)
    check(caught.value, row.name)


@pytest.mark.parametrize("kept", [[4], [-5], [0, 17]], ids=str)
@pytest.mark.parametrize("row", [r for r in ROWS if r.subsampling], ids=lambda row: row.name)
def test_subsampling_of_samples_that_are_not_there(row: Row, kept: list[int]) -> None:
    model = packprop.extend(network())
    x, y = batch(4)
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    error = refused(loss, row.make(subsampling=kept), model=model)
    check(error, "subsampling", "4")


@pytest.mark.parametrize("kept", ["01", 3, [0.5], [[0]], [True], []], ids=repr)
@pytest.mark.parametrize("row", [r for r in ROWS if r.subsampling], ids=lambda row: row.name)
def test_subsampling_that_is_no_list_of_integers(row: Row, kept: Any) -> None:
    with pytest.raises(ValueError, match="subsampling") as caught:
        row.make(subsampling=kept)
    check(caught.value, row.name)


def test_subsampling_takes_numbers_of_numpy() -> None:
    chosen = extensions.BatchGrad(subsampling=[*np.arange(2)]).subsampling
    assert chosen == [0, 1]
    assert all(type(index) is int for index in chosen)


def test_an_unknown_approximation() -> None:
    with pytest.raises(ValueError, match="approximation") as caught:
        extensions.KFAC(approximation="everything")
    check(caught.value, "everything", "expand", "reduce", "mixed")


@pytest.mark.parametrize("hook", ["print", 3], ids=repr)
def test_a_hook_that_cannot_be_called(hook: Any) -> None:
    with pytest.raises(ValueError, match="extension_hook") as caught:
        packprop.backpack(extensions.BatchGrad(), extension_hook=hook)
    check(caught.value)


def test_a_kronecker_factor_that_no_memory_holds() -> None:
    layer = Raw(lambda m, ids: ids[:, :1] * m.w, w=(20_000,))
    model = packprop.extend(nn.Sequential(layer, nn.Flatten()))
    out = model(torch.tensor([[0, 1], [2, 3]]))
    loss = packprop.extend(nn.MSELoss())(out, torch.zeros_like(out))
    check(refused(loss, extensions.KFAC(otherwise="error"), model=model), "20000", "gib")
