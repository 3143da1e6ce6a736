"""A data set on several ranks: the values are those of one process, whoever has which samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packprop import Store
from packprop.extensions import BatchGrad
from tests.dataset import on_ranks
from tests.dataset.on_ranks import SIZE, computed, samples
from tests.distributed.processes import in_processes, needs_groups, outcomes_of
from tests.selection import often, thorough

pytestmark = needs_groups


def assert_same(found: Any, expected: Any, rows: bool = True) -> None:
    """Up to rounding; without ``rows`` those of samples may come in another order."""
    assert found[1] == expected[1]
    assert found[2] == pytest.approx(expected[2], rel=1e-12)
    assert found[3] == expected[3]
    assert list(found[0]) == list(expected[0])
    for savefield, values in expected[0].items():
        for name, value in values.items():
            if savefield == "ekfac":
                assert_near(found[0][savefield][name].values, value.values)
                continue
            for mine, other in zip(as_list(found[0][savefield][name]), as_list(value), strict=True):
                if not rows and len(other) == expected[1]:
                    mine, other = (np.sort(each.reshape(len(each), -1), axis=0) for each in (mine, other))
                assert_near(mine, other)


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def assert_near(found: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=1e-9, atol=1e-13)


@often(lambda world: world == 2)
@pytest.mark.parametrize("world", [2, 3])
def test_values_are_those_of_one_process(world: int) -> None:
    """Every form of data, equal and unequal numbers of batches, ranks without any; the same on all ranks."""
    x, y = samples()
    mean, total = computed((x, y), batch_size=SIZE), computed((x, y), "sum", batch_size=SIZE)
    for found in in_processes(on_ranks.every_form, world, world):
        assert_same(found["tensors"], mean)
        assert_same(found["data set"], mean)
        assert_same(found["one batch"], mean)
        assert_same(found["sum"], total)
        assert_same(found["own"], mean)
        assert_same(found["some ranks"], mean)
        assert_same(found["batches"], mean)
        assert_same(found["unequal batches"], mean, rows=False)
        if "sampler" in found:
            assert_same(found["sampler"], computed((x[:22], y[:22]), batch_size=SIZE), rows=False)


SAID = {
    "other model": ("by its model: class: ", "by its model: class: "),
    "other values": ("by its extensions: ",) * 2,
    "other data": ("by its data: some values", "by its data: some values"),
    "bad data on one": (
        "rank 1\n  why:     it has failed:\ncompute(...) was called.\n  where:   data int",
        "data int",
    ),
    "read once": ("these data can be read once", "these data can be read once"),
    "fails on one": ("rank 1\n  why:     it has failed", "the disk is gone"),
    "other reductions": ("by its reduction of the loss: mean there, sum here",) * 2,
    "other factors": ("multiplies the loss by",) * 2,
    "sampler that pads": ("it gives 1 of them twice",) * 2,
    "sampler that pads inside": ("it gives 1 of them twice",) * 2,
    "unknown ranks": ("it does not say which samples",) * 2,
    "nothing": ("the data hold no sample",) * 2,
    "and goes on": ("23", "23"),
}


@thorough
def test_what_does_not_go_together_is_refused_on_all_ranks() -> None:
    first, second = in_processes(on_ranks.refusals, 2, 2)
    assert list(first) == list(SAID)
    for name, (of_first, of_second) in SAID.items():
        assert of_first in first[name], name
        assert of_second in second[name], name
        assert first[name] != "nothing"


@thorough
def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    """From 2 ranks to 3, to 1; a rank fails each time, and all of them say so."""
    x, y = samples(23)
    expected = computed((x, y), batch_size=SIZE)
    said = in_processes(on_ranks.interrupted, 2, tmp_path, 1, 2, "samples")
    assert "what is kept" in said[0]
    assert "the first 2 batches, 10 samples" in said[0]
    assert all("the disk is gone" in each for each in said)
    said = in_processes(on_ranks.interrupted, 3, tmp_path, 1, 3, "samples")
    assert "the first 5 batches, 23 samples" in said[0] or "second reading" in said[0]
    found = on_ranks.continued(0, tmp_path, 1, "samples")
    assert_same(found, expected)
    for again in in_processes(on_ranks.continued, 2, tmp_path, 2, "samples"):
        assert_same(again, expected)


@thorough
def test_batches_of_ranks_go_on_with_as_many(tmp_path: Path) -> None:
    x, y = samples()
    said = in_processes(on_ranks.interrupted, 2, tmp_path, 2, 2, "batches")
    assert "the first 4 batches" in said[0]
    assert "it was written by 2 ranks" in on_ranks.continued(0, tmp_path, 1, "batches")
    for found in in_processes(on_ranks.continued, 2, tmp_path, 2, "batches"):
        assert_same(found, computed((x, y), batch_size=SIZE))


@thorough
def test_a_rank_that_is_killed_ends_the_others() -> None:
    outcomes = outcomes_of(on_ranks.left_alone, 3, 3, patient=True, seconds=90)
    assert outcomes[2].error == "it died"
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.error
        said, seconds = outcome.value
        assert "one of them has ended" in said or "it has failed" in said
        assert seconds < 60


@thorough
def test_ranks_draw_for_themselves(tmp_path: Path) -> None:
    """All samples are the same, and all ranks begin with one seed: their draws differ all the same."""
    results = in_processes(on_ranks.drawn, 2, 2, tmp_path)
    for alone, again in results:
        rows = alone[0]["diag_ggn_mc_batch"]["2.bias"]
        assert len(np.unique(rows[:, 0].round(12))) > 1
        assert_same(again, alone)
        for savefield in ("kfac", "diag_ggn_mc_batch"):
            for name, value in alone[0][savefield].items():
                for mine, other in zip(as_list(again[0][savefield][name]), as_list(value), strict=True):
                    assert_near(mine, other)


@thorough
def test_random_states_are_left_as_on_one_process() -> None:
    """Ranks whose states were the same go on alike; a state that nothing was drawn from is as it was."""
    first, second = in_processes(on_ranks.states_after, 2)
    for found in (first, second):
        changed = {name: not torch.equal(before, after) for name, (before, after) in found.items()}
        assert changed == {name: name.endswith(", drawn") for name in found}
    for name in ("same, drawn", "same, not drawn"):
        assert torch.equal(first[name][1], second[name][1])
    assert not torch.equal(first["own, drawn"][1], second["own, drawn"][1])


@thorough
@pytest.mark.parametrize("world", [2, 3])
def test_no_rank_waits_for_one_that_fails_when_a_checkpoint_is_due(world: int, tmp_path: Path) -> None:
    """Whether all can go on is agreed before exchanges that only some would come to."""
    for found in in_processes(on_ranks.fails_when_due, world, world, tmp_path, seconds=60):
        assert list(found) == list(on_ranks.WHERE)
        for where, (said, count) in found.items():
            assert ("builtins.object" if where == "state" else "the disk is gone") in said, (where, said)
            assert count == 23


@thorough
def test_ranks_store_samples_under_their_indices(tmp_path: Path) -> None:
    in_processes(on_ranks.stores, 2, 2, tmp_path)
    expected = computed(samples(), "sum", given=[BatchGrad()])[0]["grad_batch"]["0.weight"]
    for size in (2, 100):
        store = Store(tmp_path / str(size))
        assert store.identifiers.sort().values.tolist() == list(range(23))
        assert_near(store["grad_batch", "0.weight"].torch(), expected[store.identifiers])
