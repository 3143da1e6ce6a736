"""Results while their chunks arrive."""

from __future__ import annotations

import torch

from packprop.engine.algebra.monoid import KEEP, ONE, SUM, Extent, Partial


def test_sums_are_added_up_in_memory_of_their_own() -> None:
    values = [torch.full((3,), float(number)) for number in range(1, 5)]
    total, places = Partial(SUM, SUM), []
    for number, value in enumerate(values):
        total.put(value, ONE, Extent(number, number + 1, 5))
        places.append([each.data_ptr() for each in total.tensors()])
    assert places[1] == places[2] == places[3]  # the third and the fourth are added in place
    assert places[1] not in [[each.data_ptr()] for each in values]
    total.put(torch.ones(3), ONE, Extent(4, 5, 5))
    assert torch.equal(total.result(), torch.full((3,), 11.0))
    assert [float(value[0]) for value in values] == [1.0, 2.0, 3.0, 4.0]


def test_a_value_that_all_chunks_share_stays_as_it_is() -> None:
    kept = Partial(SUM, KEEP)
    for number in range(4):
        kept.put(torch.ones(3), ONE, Extent(number, number + 1, 4))
    assert torch.equal(kept.result(), torch.ones(3))
