"""Extensions, which say what to compute: an extension has rows, and a row has a seed and a statistic."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor

from packprop.engine.algebra.monoid import CAT as CAT
from packprop.engine.algebra.monoid import MOMENTS as MOMENTS
from packprop.engine.algebra.monoid import SUM as SUM
from packprop.engine.algebra.monoid import Monoid
from packprop.engine.tensors.precision import NARROW, accumulation_dtype
from packprop.errors import BadInput, PackpropWarning


@dataclass(frozen=True, eq=False)
class Seed:
    """The seed vectors that a sweep starts from; extensions with equal seeds share a sweep.

    Args:
        kind: ``"gradient"``, ``"ggn"``, ``"empirical"`` (the gradient at the scale of a drawn column of a
            GGN), ``"hessian"``, ``"hessian_mc"``, ``"jacobian"``, ``"graph"`` (no seed vector; the statistic
            takes the graph, and yields a value for each leaf), or ``"none"`` (statistics of the inputs alone).
        mc_samples: Number of Monte Carlo draws; ``None`` for the exact square root of the loss Hessian.
        generator: Source of the draws; ``None`` for the global generator.
        entrywise: Whether there must be one column for each entry of the output, even where fewer suffice.
        entries: The entries of a sample's output to differentiate for a Jacobian; ``None`` for all.
        by_token: Whether the seed vectors are split by the positions of the losses; see NOTE [Tokens].
        fresh: Whether the seed makes its own draws, and does not share those of an otherwise equal seed.
    """

    kind: str
    mc_samples: int | None = None
    generator: torch.Generator | None = None
    entrywise: bool = False
    entries: tuple[int, ...] | None = None
    by_token: bool = False
    fresh: bool = False

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Seed) and vars(self) == vars(other))

    def __hash__(self) -> int:
        return hash(self.kind)  # a pass looks seeds up often, and has few of one kind


GRADIENT = Seed("gradient")
GRADIENT_BY_TOKEN = Seed("gradient", by_token=True)
EXACT = Seed("ggn")
EXACT_BY_TOKEN = Seed("ggn", by_token=True)
ENTRYWISE = Seed("ggn", entrywise=True)
EMPIRICAL = Seed("empirical")
HESSIAN = Seed("hessian")
INPUTS = Seed("none")
GRAPH = Seed("graph")


@dataclass(frozen=True)
class Row:
    """One of the statistics that make up an extension.

    Args:
        seed: The seed of the sweep.
        statistic: Maps a structure of some samples and columns to a partial result.
        over_n: Merges partial results of disjoint samples.
        over_v: Merges results of disjoint columns.
        whole: Whether the statistic needs all samples at once.
        degree: A factor c on the loss multiplies the statistic by ``c ** degree``.
        after: Only for the last row of an extension that needs a second pass: replaces the results of the
            rows before it. The statistic gets the replacements as its second argument. The second pass
            begins when those rows, of the same seed (perhaps with fresh draws) or of inputs, are complete.
            See NOTE [Second pass].
        condenses: Whether every cotangent enters a result that is smaller than the cotangents, so that NaN and
            infinity show in the result.
        of_parameter: Whether the statistic also takes the ``name`` and ``shape`` of the parameter.
    """

    seed: Seed
    statistic: Callable[..., Any]
    over_n: Monoid = SUM
    over_v: Monoid = SUM
    whole: bool = False
    degree: float = 1.0
    after: Callable[[list[Any]], list[Any]] | None = None
    condenses: bool = False
    of_parameter: bool = False

    @property
    def sums(self) -> bool:
        """Tell whether the result stays as large as a parameter for any number of samples and columns."""
        return self.over_n.axis is None and self.over_v.axis is None


class Extension:
    """A quantity to compute: its rows, the function that turns their results into a value, and its attribute.

    A subclass defines ``savefield``, the attribute that the value is saved in, and ``rows``. It also defines
    ``finish``, unless the value is simply the result of its only row.
    """

    savefield: ClassVar[str]
    keeps_graph: ClassVar[bool] = False
    """True if values hold the graph, so that the backward pass must not free it."""
    of_batch: ClassVar[bool] = False
    """True for a quantity of the whole batch, which does not need separate samples."""
    cheaper: ClassVar[str] = ""
    """A faster alternative, if there is one; the warning about long work names it."""
    rounded: ClassVar[bool] = False
    """True if values are rounded to the parameter's precision: for per-sample gradients, which are large."""
    sample_axis: ClassVar[int] = 0
    """The sample axis of a value that grows with the number of samples."""
    subsampling: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Refuse a ``subsampling`` that is not a list of the indices of at least one sample."""
        chosen = self.subsampling
        if chosen is None:
            return
        is_list = isinstance(chosen, (list, tuple, range)) and len(chosen) > 0
        if not is_list or any(isinstance(i, bool) or not isinstance(i, Integral) for i in chosen):
            raise BadInput(
                f"{self.name}(subsampling={chosen!r}) was asked for.",
                "subsampling",
                "it is not a list of the indices of at least one sample",
                "give whole numbers, as in subsampling=[0, 3, 5]",
            )
        if any(type(i) is not int for i in chosen):  # those of numpy
            object.__setattr__(self, "subsampling", [int(i) for i in chosen])

    @property
    def rows(self) -> tuple[Row, ...]:
        """The statistics that the value is computed from."""
        raise NotImplementedError(f"{type(self).__name__} must define rows")

    @property
    def degrees(self) -> tuple[float, ...]:
        """The degree of each result that ``finish`` takes: the power of the loss that it grows with.

        ``after`` turns the results before a second pass into eigenvectors. A factor on the loss does not change
        these, so their degree is 0.
        """
        rows = self.rows
        first = 0.0 if rows[-1].after is not None else None
        return (*(row.degree if first is None else first for row in rows[:-1]), rows[-1].degree)

    @property
    def takes_hessian(self) -> bool:
        """Tell whether the extension takes second derivatives of the whole loss, which contains penalties."""
        return any(row.seed.kind.startswith("hessian") for row in self.rows)

    def dtype_of(self, parameter: torch.dtype) -> torch.dtype:
        """Return the precision of values: that of sums, or that of the parameter if they are rounded to it."""
        return parameter if self.rounded or parameter not in NARROW else accumulation_dtype(parameter)

    def finish(self, values: list[Any], samples: int) -> Any:
        """Return the value, from the merged results of the rows and the number of samples that they cover."""
        return values[0]

    @property
    def name(self) -> str:
        """The name in tables and messages."""
        return type(self).__name__


Extensions = Extension | Sequence[Extension]
"""One argument: an extension, or several in a list."""


def check_extensions(asked: str, *given: Any) -> tuple[Extension, ...]:
    """Return the extensions, given one by one, in lists, or both, without duplicates.

    Raises:
        BadInput: A ``ValueError``, for a class in place of an instance, anything that is not an extension, or
            without a name to save a value under.
    """
    extensions: list[Any] = []
    for each in given:
        several = isinstance(each, Iterable) and not isinstance(each, (str, bytes, Mapping, Tensor, type))
        extensions += each if several else [each]
    for extension in extensions:
        if isinstance(extension, type) and issubclass(extension, Extension):
            raise BadInput(
                asked,
                f"extension {extension.__name__}",
                "it is a class, not an instance",
                f"write {extension.__name__}()",
            )
        if not isinstance(extension, Extension):
            raise BadInput(
                asked,
                f"argument {extension!r} of type {type(extension).__name__}",
                "it is not an extension",
                "give instances from packprop.extensions, or of your own subclass of Extension",
            )
        if type(extension).__hash__ is None:
            raise BadInput(
                asked,
                f"extension {extension.name}",
                "its class has no hash, as a dataclass whose fields may change",
                "decorate the class with @dataclass(frozen=True)",
            )
        field = getattr(extension, "savefield", "")
        own = getattr(Tensor, field, None)
        if not field or (own is not None and not callable(own)):
            raise BadInput(
                asked,
                f"extension {extension.name}, which is saved as {field!r}",
                "it is empty, or every tensor has an attribute of that name, which the value would replace",
                f"give it another one, as in savefield = {extension.name.lower()!r}",
            )
    once = tuple(dict.fromkeys(extensions))  # an extension that is given twice counts once
    if len(once) > 1:
        warn_of_shared_attributes(once)
    return once


def warn_of_shared_attributes(extensions: Iterable[Any]) -> None:
    """Warn of extensions that save different values in one attribute, which holds the last value."""
    earlier: dict[str, Any] = {}
    for extension in extensions:
        field = getattr(extension, "savefield", "")
        before = earlier.get(field, extension)
        earlier[field] = extension
        if before is extension:
            continue
        if type(before) is not type(extension) or repr(vars(before)) != repr(vars(extension)):
            warnings.warn(
                f"{before!r} and {extension!r} are both saved as {field!r}, which holds the value of the "
                "last one: ask for each in a separate backward pass.",
                PackpropWarning,
                stacklevel=2,
            )
