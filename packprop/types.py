"""The words that every floor shares: axis letters, layouts of samples, seeds and rows of the catalogue.

Axis letters, the same in einsum strings, docstrings and errors: ``v`` column of a seed, ``n`` sample,
``s`` shared position, ``g`` group, ``i`` fan-in, ``o`` fan-out, ``p`` parameter entry, ``c`` model output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from packprop.errors import BadInput
from packprop.monoid import SUM, Monoid


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, dictionaries and dataclasses, depth first."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (tuple, list)):
            stack.extend(reversed(item))
        elif isinstance(item, dict):
            stack.extend(reversed(item.values()))
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            stack.append(vars(item))


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same nesting with ``function`` applied to every tensor."""
    return map_kind(Tensor, function, value)


def map_kind(kind: type, function: Callable[[Any], Any], value: Any) -> Any:
    """The same nesting with ``function`` applied to every instance of ``kind``."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {key: map_kind(kind, function, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [map_kind(kind, function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


class Layout(NamedTuple):
    """Where the samples of a tensor are.

    Args:
        axis: The axis of extent ``samples * parts``; ``None`` where the whole tensor is one sample.
        samples: Number of samples.
        parts: Number of shared positions folded into the same axis.
        major: Whether the sample index varies slower than the part index.
    """

    axis: int | None
    samples: int
    parts: int = 1
    major: bool = True

    def to_front(self, tensor: Tensor, skip: int = 0) -> Tensor:
        """Move samples to axis ``skip``: ``[*skipped, n, (parts), *rest]`` without copying if possible."""
        if self.axis is None:
            return tensor.unsqueeze(skip)
        axis = self.axis + skip
        if self.parts == 1:
            return tensor if axis == skip else tensor.movedim(axis, skip)
        split = (self.samples, self.parts) if self.major else (self.parts, self.samples)
        tensor = tensor.unflatten(axis, split)
        return tensor.movedim(axis if self.major else axis + 1, skip)

    def front_shape(self, shape: torch.Size) -> torch.Size:
        """The shape that ``to_front`` makes of ``shape``."""
        if self.axis is None:
            return torch.Size([1, *shape])
        parts = [] if self.parts == 1 else [self.parts]
        return torch.Size([self.samples, *shape[: self.axis], *parts, *shape[self.axis + 1 :]])

    def from_front(self, tensor: Tensor, skip: int = 0) -> Tensor:
        """The inverse of ``to_front``."""
        if self.axis is None:
            return tensor.squeeze(skip)
        axis = self.axis + skip
        if self.parts == 1:
            return tensor if axis == skip else tensor.movedim(skip, axis)
        return tensor.movedim(skip, axis if self.major else axis + 1).flatten(axis, axis + 1)

    def sample_of(self, device: torch.device) -> Tensor:
        """The sample index of each entry along ``axis``."""
        index = torch.arange(self.samples, device=device)
        if self.parts == 1:
            return index
        return index.repeat_interleave(self.parts) if self.major else index.repeat(self.parts)

    def transposed(self, dims: int) -> Layout:
        """The layout of the same tensor of ``dims`` axes with its last two axes exchanged."""
        if self.axis is None or self.axis < dims - 2:
            return self
        return self._replace(axis=2 * dims - 3 - self.axis)

    def __str__(self) -> str:
        if self.axis is None:
            return "one sample"
        parts = "" if self.parts == 1 else f" x {self.parts} parts{'' if self.major else ' (minor)'}"
        return f"axis {self.axis}: {self.samples} samples{parts}"


def layouts(shape: torch.Size, samples: int) -> list[Layout]:
    """Every way in which a tensor of ``shape`` can hold ``samples`` samples, the usual ones first."""
    if samples == 1:
        return [Layout(None, 1)]
    exact = [Layout(axis, samples) for axis, size in enumerate(shape) if size == samples]
    folded = [
        Layout(axis, samples, size // samples, major)
        for major in (True, False)
        for axis, size in enumerate(shape)
        if size > samples and size % samples == 0
    ]
    found = exact + folded
    if shape and shape[0] % samples == 0:  # the leading axis first, folded or not
        found.sort(key=lambda layout: layout.axis != 0)
    return found


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


def precision(vectors: Tensor, products: Tensor) -> torch.dtype:
    """That of the vectors; products of whole numbers are fractions."""
    return vectors.dtype if vectors.is_floating_point() or vectors.is_complex() else products.dtype


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision that sums are accumulated in: at least float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
