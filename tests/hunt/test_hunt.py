"""A hundred random programs: no answer is wrong, and no error comes from anywhere but packprop.

Thousands by hand: ``make hunt``. A program that fails is printed by ``python -m tests.hunt --only SEED``, and
looked at in the fifth of as many passes with ``--passes 5``.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.hunt import operators
from tests.hunt.outcomes import BAD, hunt
from tests.hunt.programs import write
from tests.selection import often, one_in

SEEDS = range(100)

KNOWN: dict[int, str] = {}
"""Seeds of programs that fail, and why: strict, so that a mended defect shows as a test that passes."""


@one_in(5)
@often(lambda seed: seed < 30)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.xfail(reason=KNOWN[seed], strict=True) if seed in KNOWN else ())
        for seed in SEEDS
    ],
)
def test_right_or_refused(seed: int) -> None:
    program, outcomes = hunt(seed)
    bad = [f"{o.quantity} {o.status}: {o.reason}\n{o.detail}" for o in outcomes if o.status in BAD]
    assert not bad, program.text + "\n".join(bad)


@one_in(5)
@often(lambda seed: seed < 1010)
@pytest.mark.parametrize("seed", range(1000, 1050))
def test_right_or_refused_in_a_later_pass(seed: int) -> None:
    """What packprop keeps from passes with other data holds for the fifth one."""
    program, outcomes = hunt(seed, passes=5)
    bad = [f"{o.quantity} {o.status}: {o.reason}\n{o.detail}" for o in outcomes if o.status in BAD]
    assert not bad, program.text + "\n".join(bad)


def test_programs_say_something() -> None:
    """Few programs are of no use, and what they are made of is of many kinds."""
    tags = Counter(tag for seed in range(400) for tag in write(seed).tags)
    assert len(tags) > 60
    assert sum(count for tag, count in tags.items() if tag.startswith("mixing: ")) > 20
    sample = [hunt(seed, ("gradients",))[1] for seed in range(0, 100, 10)]
    assert sum(any(o.status == "right" for o in outcomes) for outcomes in sample) >= 3


def test_a_program_is_its_seed() -> None:
    assert write(7) == write(7)


@one_in(3)
@pytest.mark.parametrize("name", ["narrow_copy", "tile", "logcumsumexp", "diff", "matmul", "topk"])
def test_functions_of_the_list_of_pytorch(name: str) -> None:
    """A few of all; the hunt goes through the rest."""
    found = [outcome for _, outcomes in operators.hunt(name) for outcome in outcomes]
    assert not [(o.quantity, o.reason, o.detail) for o in found if o.status in BAD]
    assert any(outcome.status == "right" for outcome in found)
