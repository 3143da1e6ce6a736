"""The pencil: what blocks of the grammar write a program with, and the table that they stand in."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Form:
    """What the variable ``h`` holds at some line: n samples, and where they are.

    ``vec [n, d]``, ``seq [n, t, d]``, ``first [t, n, d]``, ``fold [n * t, d]``, ``major [t * n, d]`` (the
    first position of all samples leads), ``map [n, c, t]``, ``image [n, c, a, b]``; ``dims`` leaves
    the samples out.
    """

    kind: str
    dims: tuple[int, ...]

    @property
    def last(self) -> int:
        """The extent of the last axis."""
        return self.dims[-1]

    @property
    def leading(self) -> bool:
        """Whether the first axis holds the samples and nothing else."""
        return self.kind in ("vec", "seq", "map", "image")

    def with_last(self, extent: int) -> Form:
        """The same with another extent of the last axis."""
        return Form(self.kind, (*self.dims[:-1], extent))


@dataclass
class Writer:
    """A model under construction: lines of ``__init__``, of ``forward``, and of further methods."""

    rng: random.Random
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    names: int = 0
    depth: int = 0

    def name(self, prefix: str) -> str:
        """A name that nothing has yet."""
        self.names += 1
        return f"{prefix}{self.names}"

    def module(self, text: str) -> str:
        """A submodule of its own."""
        name = self.name("self.layer")
        self.init.append(f"{name} = {text}")
        return name

    def weight(self, *shape: int) -> str:
        """A raw parameter of random numbers."""
        name = self.name("self.w")
        self.init.append(f"{name} = nn.Parameter(torch.randn({', '.join(map(str, shape))}))")
        return name

    def line(self, text: str) -> None:
        """A line of the present function."""
        self.body.append(text)

    def set(self, text: str) -> None:
        """``h`` becomes something else."""
        self.line(f"h = {text}")

    def chance(self, probability: float) -> bool:
        """True so often."""
        return self.rng.random() < probability

    def size(self) -> int:
        """An extent, often that of something else."""
        return self.rng.choice((2, 3, 3, 4))

    def choose(self, *options: Any) -> Any:
        """One of these."""
        return self.rng.choice(options)

    @contextmanager
    def method(self) -> Iterator[str]:
        """What is written inside stands in a method of its own, which takes and returns ``h``."""
        name, outer = self.name("part"), self.body
        self.body = []
        yield f"self.{name}"
        lines = ["n = h.shape[0]", *self.body, "return h"]
        self.methods += [f"def {name}(self, h):", *(f"    {line}" for line in lines), ""]
        self.body = outer


Block = Callable[[Writer, Form], Form]


@dataclass(frozen=True)
class Rule:
    """A block, the kinds that it takes, and how often it is drawn."""

    block: Block
    kinds: tuple[str, ...]
    weight: float
    same: bool


RULES: list[Rule] = []
LAST = ("vec", "seq", "first", "fold", "major")
"""Kinds whose last axis holds features, so that what is done there is done for each position."""


def block(*kinds: str, weight: float = 1.0, same: bool = False) -> Callable[[Block], Block]:
    """Register a block; ``same`` says that it never changes the form."""

    def register(function: Block) -> Block:
        RULES.append(Rule(function, kinds, weight, same))
        return function

    return register


def extend_by_one(writer: Writer, form: Form, same: bool = False) -> Form:
    """Write one more random block."""
    rules = [rule for rule in RULES if form.kind in rule.kinds and (rule.same or not same)]
    (rule,) = writer.rng.choices(rules, [rule.weight for rule in rules])
    writer.tags.append(rule.block.__name__)
    return rule.block(writer, form)


def same_form(writer: Writer, form: Form, count: int) -> None:
    """Write some blocks that leave the form as it is."""
    for _ in range(count):
        extend_by_one(writer, form, same=True)
