"""Some cases of the one list on two and three ranks; `make ranks` takes all of them."""

from __future__ import annotations

import pytest

from tests.distributed.comparison import compare, summary
from tests.distributed.processes import in_processes, needs_groups
from tests.selection import thorough

pytestmark = needs_groups

NAMES = [
    *("linear-2d", "conv2d", "embedding", "gru", "class-token", "module-twice", "weight-norm"),
    *("experts-grouped", "ce-plain", "learned-queries", "two-losses-one-output"),
]


@thorough
@pytest.mark.parametrize(("kind", "ranks"), [("DDP", 3), ("FSDP2", 2)])
def test_values_are_those_of_one_process(kind: str, ranks: int) -> None:
    lines, wrong = summary(in_processes(compare, ranks, NAMES, kind))
    assert not wrong, "\n".join(lines)
    assert lines == [f"{len(NAMES)} cases right, 0 wrong, 0 refused, 0 refused in one process, too"]
