"""A head that is tied to its embedding: norms without a table for each sample."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import packprop
from packprop import extensions
from packprop.engine.algebra.choices import algorithms
from packprop.engine.algebra.structures import Tied
from packprop.engine.memory import LiveBytes
from tests.cases import BY_NAME
from tests.cases.models.language import LanguageModel
from tests.references.running import assert_all_near, backward, reference, results


@pytest.mark.parametrize("name", [name for name in BY_NAME if name.startswith("language-model")])
def test_norms_are_those_of_the_oracle(name: str) -> None:
    case = BY_NAME[name]
    reduction = case.reductions[0]
    problem = case.problem(3, reduction)
    with algorithms(norms="products"):
        backward(problem, extensions.BatchL2Grad(), record=case.record)
    assert_all_near(results(problem, "batch_l2"), reference(name, 3, reduction).batch_l2, "batch_l2")


def test_no_table_for_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is that of a plain pass and less than one table more, however many samples there are."""
    monkeypatch.setattr(Tied, "rows", property(lambda _: pytest.fail("per-sample gradients were formed")))
    model = packprop.extend(LanguageModel(2000, 64, 4))
    ids, labels = torch.randint(2000, (16, 4)), torch.randint(2000, (16, 4))
    peaks = []
    for asked in ((), (extensions.BatchL2Grad(),), (extensions.BatchL2Grad(),)):
        model.zero_grad()
        with LiveBytes() as live, packprop.backpack(*asked):
            packprop.extend(nn.CrossEntropyLoss())(model(ids).transpose(1, 2), labels).backward()
        peaks.append(live.peak)
    assert peaks[-1] - peaks[0] < 4 * 2000 * 64
