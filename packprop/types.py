"""What can be asked for: an extension is made of rows, a row of a seed and a statistic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from packprop.algebra.monoid import SUM, Monoid
from packprop.errors import BadInput


@dataclass(frozen=True)
class Seed:
    """What is fed in at a node of the graph; extensions that want an equal seed share its sweep.

    Args:
        kind: ``"gradient"``, ``"ggn"``, ``"empirical"`` (the gradient at the scale of a drawn column of a
            GGN), ``"hessian"``, ``"hessian_mc"``, ``"jacobian"``, ``"graph"`` (nothing: the statistic is given
            the graph, and yields a value for each leaf), or ``"none"`` for statistics of the inputs alone.
        mc_samples: Monte Carlo draws; ``None`` for the exact square root of the loss Hessian.
        generator: Source of the draws; ``None`` for the global one.
        entrywise: Whether there shall be one column for each entry of the output, where fewer would do.
        entries: Of a sample's output, for Jacobians; ``None`` for all.
    """

    kind: str
    mc_samples: int | None = None
    generator: torch.Generator | None = field(default=None, compare=True)
    entrywise: bool = False
    entries: tuple[int, ...] | None = None


GRADIENT = Seed("gradient")


EXACT = Seed("ggn")


ENTRYWISE = Seed("ggn", entrywise=True)


EMPIRICAL = Seed("empirical")


HESSIAN = Seed("hessian")


INPUTS = Seed("none")


GRAPH = Seed("graph")


@dataclass(frozen=True)
class Row:
    """One statistic that an extension is made of.

    Args:
        seed: What is swept back.
        statistic: From a structure of some samples and columns to a partial result.
        over_n: How partial results of disjoint samples merge.
        over_v: How results of disjoint columns merge.
        whole: Whether the statistic needs all samples at once.
        degree: Power of a factor on the loss that the statistic is multiplied by.
        after: Makes the last row of an extension one of a second pass, which begins when the rows before it,
            of the same seed or of inputs, are complete: turns their results into what takes their place, and
            is given to the statistic beside the structure. See NOTE [Second pass].
    """

    seed: Seed
    statistic: Callable[..., Any]
    over_n: Monoid = SUM
    over_v: Monoid = SUM
    whole: bool = False
    degree: float = 1.0
    after: Callable[[list[Any]], list[Any]] | None = None

    @property
    def sums(self) -> bool:
        """Whether the result is no larger than a parameter, for many samples and columns."""
        return not (self.over_n.grows or self.over_v.grows)


class Extension:
    """What a user asks for: rows of statistics, how they are finished, the attribute they are saved in.

    Subclass it with three attributes, ``savefield``, ``rows`` and, if the value is not that of the only row,
    ``finish``.
    """

    savefield: ClassVar[str]
    keeps_graph: ClassVar[bool] = False
    """Whether values hold the graph, so that the backward pass must not free it."""
    subsampling: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Refuse a choice of samples that is no list of whole numbers."""
        chosen = self.subsampling
        if chosen is None:
            return
        fits = isinstance(chosen, (list, tuple, range)) and len(chosen) > 0
        if not fits or any(isinstance(i, bool) or not isinstance(i, int) for i in chosen):
            raise BadInput(
                f"{self.name}(subsampling={chosen!r}) was asked for.",
                "subsampling",
                "it is not a list of the indices of at least one sample",
                "give whole numbers, as in subsampling=[0, 3, 5]",
            )

    @property
    def rows(self) -> tuple[Row, ...]:
        """The statistics that the value is made of."""
        raise NotImplementedError(f"{type(self).__name__} must define rows")

    def finish(self, values: list[Any], samples: int) -> Any:
        """The value from one merged result for each row and the number of samples seen."""
        return values[0]

    @property
    def name(self) -> str:
        """Name in tables and messages."""
        return type(self).__name__
