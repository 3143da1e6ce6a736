"""Extensions that are wrong are caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

import packprop
from packprop import extensions
from packprop.applications.dataset import state
from packprop.engine.algebra.monoid import CAT
from packprop.engine.algebra.structures import Outer
from packprop.engine.passes import saving
from packprop.testing import CheckFailed, check_extension
from packprop.types import EXACT, GRADIENT, INPUTS, Extension, Row
from tests.selection import one_in
from tests.testing.registered import absolute, made


def counts_passes(self: Extension, values: list[Any], samples: int) -> Tensor:
    seen = vars(self).setdefault("seen", {})
    shape = tuple(values[0].shape)
    seen[shape] = seen.get(shape, 0) + 1
    return values[0] * seen[shape]


@dataclass(frozen=True, eq=False)
class Forgetful(Extension):
    """An extension that divides by the wrong number if samples are chosen."""

    subsampling: list[int] | None = None
    savefield = "forgetful"
    rows = (Row(GRADIENT, absolute),)

    def finish(self, values: list[Any], samples: int) -> Tensor:
        return values[0] / (1 if self.subsampling is None else 2)


WRONG_EXTENSIONS: dict[str, tuple[Callable[[], Extension], Any, str, str]] = {
    "mean over a chunk": (
        lambda: made(lambda s: s.rows.mean((0, 1))),
        None,
        "chunks of samples",
        "1 of 4 at once",
    ),
    "needs all samples": (
        lambda: made(lambda s: s.rows[0].amax(0)),
        None,
        "chunks of samples",
        "whole=True",
    ),
    "over_n": (
        lambda: made(lambda s: s.rows[0].flatten(1).norm(dim=1)),
        None,
        "chunks of samples",
        "over_n",
    ),
    "over_v": (
        lambda: made(lambda s: s.rows.square().sum((0, 1)), seed=EXACT, over_v=CAT[0]),
        None,
        "columns at once",
        "over_v",
    ),
    "columns are added before they are squared": (
        lambda: made(lambda s: s.rows.sum(0).square().sum(0), seed=EXACT),
        None,
        "columns at once",
        "one by one",
    ),
    "accumulates": (lambda: made(absolute, counts_passes), None, "", "parameter"),
    "degree": (
        lambda: made(lambda s: s.rows.square().sum((0, 1))),
        None,
        "scales with the loss",
        "degree",
    ),
    "degree of columns": (
        lambda: made(lambda s: s.rows.square().sum((0, 1)), seed=EXACT, degree=2),
        None,
        "scales with the loss",
        "3 times the loss",
    ),
    "scale of batches": (
        lambda: made(absolute, lambda self, values, samples: values[0] / samples**2 * 4),
        lambda rows: rows[0].abs().mean(0),
        "reference",
        "largest relative error is 3",
    ),
    "another value": (
        lambda: made(absolute),
        lambda rows: rows[0].sum(0),
        "reference",
        "largest relative error",
    ),
    "another shape": (
        lambda: made(absolute),
        lambda rows: rows[0].abs(),
        "reference",
        "the shapes are",
    ),
    "detached": (
        lambda: made(lambda s: s.rows.detach().abs().sum((0, 1))),
        lambda rows: rows.abs().sum((0, 1)),
        "differentiable",
        "no parameter that the values depend on",
    ),
    "detached in part": (
        lambda: made(lambda s: (s.rows.detach() * s.rows).sum((0, 1)), degree=2),
        lambda rows: rows.square().sum((0, 1)),
        "differentiable",
        "largest relative error is 0.5",
    ),
    "no value": (
        lambda: made(absolute, lambda self, values, samples: None),
        None,
        "saved on every parameter",
        "there is no value",
    ),
    "only for some": (
        lambda: made(
            lambda s: s.x.square().sum((0, 1)) if isinstance(s, Outer) else None, seed=INPUTS, degree=0
        ),
        None,
        "saved on every parameter",
        "there is no value",
    ),
    "no number": (
        lambda: made(absolute, lambda self, values, samples: "text"),
        None,
        "saved on every parameter",
        "values of type str",
    ),
    "subsampling": (Forgetful, None, "subsampling", "all samples"),
}


@one_in(2)
@pytest.mark.parametrize("name", WRONG_EXTENSIONS)
def test_a_wrong_extension_is_caught(name: str) -> None:
    make, reference, law, text = WRONG_EXTENSIONS[name]
    with pytest.raises(CheckFailed) as caught:
        check_extension(make(), reference)
    assert law in caught.value.asked
    assert text in str(caught.value)
    assert "parameter" in caught.value.where
    assert caught.value.error > 0.1


def test_values_that_accumulate_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that adds to what an earlier pass has saved."""
    save = saving.ResultSaver.save

    def add(self: Any, leaf: Tensor, results: Any) -> None:
        before = {extension: getattr(leaf, extension.savefield, 0) for extension in results}
        save(self, leaf, results)
        for extension, value in before.items():
            setattr(leaf, extension.savefield, getattr(leaf, extension.savefield) + value)

    monkeypatch.setattr(saving.ResultSaver, "save", add)
    monkeypatch.setattr(saving.ResultSaver, "take_off", lambda *_, **__: {})
    with pytest.raises(CheckFailed, match="overwritten") as caught:
        check_extension(made(absolute))
    assert caught.value.error == pytest.approx(1)


def test_batches_that_are_merged_wrongly_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging that sums means instead of averaging them is caught."""
    monkeypatch.setattr(state, "rescale", lambda value, factor, degree: value)
    with pytest.raises(CheckFailed, match="batches of a data set"):
        check_extension(made(absolute))


@pytest.mark.parametrize("name", ["grad", "data", "sub"])
def test_a_savefield_that_every_tensor_has(name: str) -> None:
    class Own(Extension):
        savefield = name
        rows = (Row(GRADIENT, absolute),)

    with pytest.raises(packprop.BadInput, match="every tensor has an attribute"):
        check_extension(Own())


def test_a_class_in_place_of_an_extension() -> None:
    with pytest.raises(packprop.BadInput, match="class, not an instance"):
        check_extension(extensions.BatchGrad)  # type: ignore[arg-type]  # wrong on purpose
