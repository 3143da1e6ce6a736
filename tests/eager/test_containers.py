"""Inputs in containers: each is put together again as what it was, and its tensors get their gradients."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from packprop.engine.eager import eager_backward

Named = namedtuple("Named", "a b")  # as users still write them


@dataclass(frozen=True)
class Frozen:
    a: Tensor
    b: Tensor
    name: str = "frozen"


@dataclass(slots=True)
class Slotted:
    a: Tensor
    b: Tensor


class Output(OrderedDict[str, Any]):
    """Entries that are attributes, too, as what models of transformers return."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


def output(a: Tensor, b: Tensor) -> Output:
    made = Output()
    made["a"], made["b"] = a, b
    return made


MAKERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda a, b: (a, [b, "text"]),
    "dict": lambda a, b: {"a": a, "b": (b, None)},
    "namedtuple": Named,
    "ordered": lambda a, b: OrderedDict(a=a, b=b),
    "user's": lambda a, b: UserDict(a=a, b=b),
    "output": output,
    "frozen": Frozen,
    "slotted": Slotted,
}


def parts_of(made: Any) -> tuple[Tensor, Tensor]:
    if isinstance(made, (Named, Frozen, Slotted, Output)):
        return made.a, made.b
    a, b = (made["a"], made["b"]) if hasattr(made, "keys") else made
    return a, b if isinstance(b, Tensor) else b[0]


@pytest.mark.parametrize("chunks", [None, 2])
@pytest.mark.parametrize("kind", MAKERS)
def test_containers_are_taken_apart_and_put_together(kind: str, chunks: int | None) -> None:
    a, b = (torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    seen: list[Any] = []

    def fn(made: Any) -> Tensor:
        seen.append(made)
        first, second = parts_of(made)
        return (first * second.sin()).sum()

    given = MAKERS[kind](a, b)
    eager_backward(fn, given, chunks=chunks).backward()
    expected = torch.autograd.grad((a * b.sin()).sum(), [a, b])
    torch.testing.assert_close([a.grad, b.grad], list(expected))
    assert {type(made) for made in seen} == {type(given)}
    assert parts_of(given)[0] is a  # the user's own is as it was
