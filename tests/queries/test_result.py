"""What queries have found prints, and converts to plain numbers."""

from __future__ import annotations

import json

import torch

from packprop.applications.queries.result import Influence
from packprop.store.search import Found


def made() -> Influence:
    largest = Found(
        torch.tensor([[3.0, 1.5], [0.25, -1e-7]]), torch.tensor([[17, 4], [5, 4]]), torch.arange(4).view(2, 2)
    )
    smallest = Found(
        torch.tensor([[-2.0, -1.0], [-30000.0, -1e-7]]), torch.tensor([[8, 9], [6, 4]]), torch.ones(2, 2).long()
    )
    return Influence(largest, smallest, 1234, 1234.0, "grad_batch", "ekfac", 0.01)


def test_tables() -> None:
    found = made()
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "query 0"
    assert lines[3].split() == ["1", "3", "17", "0", "-2", "8", "1"]
    assert lines[7].split() == ["largest", "sample", "row", "smallest", "sample", "row"]
    assert lines[10].split() == ["2", "-1e-07", "4", "3", "-1e-07", "4", "1"]
    assert lines[-2:] == [
        "inner products with grad_batch of 1,234 samples, for a summed loss",
        "gradients of queries times (F + 0.01 I)^-1, F: ekfac",
    ]


def test_plain_numbers() -> None:
    found = made()
    plain = json.loads(found.to_json())
    assert plain == found.to_dict()
    assert (plain["samples"], plain["curvature"], plain["damping"], len(plain["queries"])) == (
        1234,
        "ekfac",
        0.01,
        2,
    )
    assert plain["queries"][0]["largest"][0] == {"identifier": 17, "row": 0, "product": 3.0}
    assert plain["queries"][1]["smallest"][0] == {"identifier": 6, "row": 1, "product": -30000.0}
