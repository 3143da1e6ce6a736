"""A function called on each sample's part of its inputs, instead of pulled back once for each sample.

# NOTE [Calls of single samples]
Nothing says which axis of an input holds the samples. So inputs are cut by their shapes, and the cut is tried
out: gradients of single samples, with random cotangents, must add up to what autograd pulls back from the whole
batch. Both are linear in the cotangents, and random numbers hide no difference between linear maps; so if they
agree, then the rows of each sample are right, for the inputs of this very call, and for samples that are taken
at once as they were tried (PyTorch's vectorised embedding takes the row of ``padding_idx`` for another one, if
there are several samples). If they do not agree, or the function does not take a part of its inputs, each
sample is pulled back through the whole batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packprop.functions.entry import Cotangents
from packprop.tensors.dry import has_fault, is_dry_run
from packprop.tensors.layout import Layout
from packprop.tensors.nesting import map_tensors, tensors_in

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

Pull = Callable[[Sequence[Any], Tensor, Sequence[Tensor]], Tensor]
"""Pulls every column back: from outputs, a parameter and columns ``[v, *y]`` to products ``[v, *p]``."""


class Way(NamedTuple):
    """How single samples are called.

    Args:
        axes: For each input the axis that holds the samples, or ``None``.
        together: Whether in one vectorised call.
    """

    axes: list[int | None]
    together: bool


@dataclass
class SampleCalls:
    """Calls of one function on the inputs of single samples.

    Args:
        function: The function.
        pull: Pulls columns back.
        ways: For samples that were taken at once the way that fits; ``None`` if none does.
    """

    function: Callable[..., Any]
    pull: Pull
    ways: dict[tuple[Layout, tuple[int, ...]], Way | None] = field(default_factory=dict, init=False)

    def rows(
        self,
        arguments: Arguments,
        weight: Tensor,
        outputs: Sequence[Any],
        cotangents: Cotangents,
        layouts: Sequence[Layout],
        index: Tensor,
    ) -> Tensor | None:
        """Gradients of some samples ``[v, n, *p]``; ``None`` if inputs cannot be cut.

        Args:
            arguments: Those of the whole batch.
            weight: The parameter among them.
            outputs: Of the whole batch.
            cotangents: What arrived at each output.
            layouts: Where the outputs hold the samples.
            index: The numbers of the samples.
        """
        layout = layouts[0]
        if layout.axis is None or layout.samples == 1 or not len(index):
            return None
        own = tuple(range(len(index))) if is_dry_run() else tuple(index.tolist())
        if (layout, own) not in self.ways:
            inputs, extent = list(tensors_in(arguments)), layout.samples * layout.parts
            cuts = _cuts(inputs, weight, layout.axis, extent)
            ways = (Way(axes, together) for axes in cuts for together in (True, False))
            chunks = _all_chunks(own, layout.samples)
            fits = (w for w in ways if self._fits(w, arguments, weight, outputs, cotangents, layouts, chunks))
            self.ways |= dict.fromkeys([(layout, chunk) for chunk in chunks], next(fits, None))
        way = self.ways[layout, own]
        return None if way is None else self._rows(way, arguments, weight, cotangents, layouts, index)

    def _fits(
        self,
        way: Way,
        arguments: Arguments,
        weight: Tensor,
        outputs: Sequence[Any],
        cotangents: Cotangents,
        layouts: Sequence[Layout],
        chunks: Sequence[tuple[int, ...]],
    ) -> bool:
        """Whether gradients of single samples add up to that of all of them; see the note above."""
        generator = torch.Generator().manual_seed(0)
        chosen = torch.tensor([number for chunk in chunks for number in chunk], device=weight.device)
        noise = [
            None
            if each is None
            else _of_chosen(torch.randn(1, *each.shape[1:], generator=generator).to(each), layout, chosen)
            for each, layout in zip(cotangents, layouts, strict=False)
        ]
        total = scale = torch.zeros_like(weight, requires_grad=False)
        for chunk in chunks[: 2 if is_dry_run() else None]:
            index = torch.tensor(chunk, device=weight.device)
            try:
                rows = self._rows(way, arguments, weight, noise, layouts, index)
            except Exception:  # whatever a function may raise that is given a part of its inputs
                return False
            if rows is None:
                return False
            total, scale = total + rows.detach()[0].sum(0), scale + rows.detach()[0].abs().sum(0)
        pairs = [(output, each) for output, each in zip(outputs, noise, strict=False) if each is not None]
        whole = self.pull([output for output, _ in pairs], weight, [each for _, each in pairs])[0]
        allowed = torch.finfo(weight.dtype).eps ** 0.6 * scale.abs().amax()
        return not has_fault(((total - whole).abs() > allowed).any() | ~scale.abs().amax().isfinite())

    def _rows(
        self,
        way: Way,
        arguments: Arguments,
        weight: Tensor,
        cotangents: Cotangents,
        layouts: Sequence[Layout],
        index: Tensor,
    ) -> Tensor | None:
        axes = way.axes
        parts = [
            tensor if axis is None else _of_samples(tensor, layouts[0]._replace(axis=axis), 0, index)
            for axis, tensor in zip(axes, tensors_in(arguments), strict=True)
        ]
        columns = [
            None if each is None else _of_samples(each, layout, 1, index)
            for each, layout in zip(cotangents, layouts, strict=False)
        ]
        if way.together:
            return self._vectorised(axes, arguments, weight, parts, columns, len(index))
        rows = []
        for n in range(len(index)):
            own = [part if axis is None else part[n] for axis, part in zip(axes, parts, strict=True)]
            outputs = self._call(arguments, own)
            reached = [(y, each[:, n]) for y, each in zip(outputs, columns, strict=False) if each is not None]
            if any(y.shape != each.shape[1:] for y, each in reached):
                return None
            rows.append(self.pull([y for y, _ in reached], weight, [each for _, each in reached]))
        return torch.stack(rows, 1)

    def _vectorised(
        self,
        axes: list[int | None],
        arguments: Arguments,
        weight: Tensor,
        parts: list[Tensor],
        columns: Sequence[Tensor | None],
        count: int,
    ) -> Tensor | None:
        """All samples in one call, each with a copy of the parameter; ``None`` where that cannot be."""
        with torch.enable_grad():
            copies = weight.expand(count, *weight.shape)

        def of_one(*tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(self._call(arguments, tensors))

        given = [copies if part is weight else part for part in parts]
        pairs = zip(axes, parts, strict=True)
        in_dims = tuple(0 if part is weight or axis is not None else None for axis, part in pairs)
        try:
            with warnings.catch_warnings(), torch.enable_grad():
                warnings.simplefilter("ignore")  # of functions that go one by one: no slower than without
                outputs = torch.vmap(of_one, in_dims)(*given)
        except Exception:  # no batching rule, a decision on data, random numbers, in place
            return None
        reached = [(y, each) for y, each in zip(outputs, columns, strict=False) if each is not None]
        if any(y.shape != each.shape[1:] for y, each in reached):
            return None
        return self.pull([y for y, _ in reached], copies, [each for _, each in reached])

    def _call(self, arguments: Arguments, tensors: Sequence[Tensor]) -> list[Tensor]:
        remaining = iter(tensors)
        args, kwargs = map_tensors(lambda _: next(remaining), arguments)
        with torch.enable_grad():
            return differentiable_outputs(self.function(*args, **kwargs))


def _all_chunks(own: tuple[int, ...], samples: int) -> list[tuple[int, ...]]:
    """All chunks of a batch that is gone through in chunks like this one; else this one alone."""
    step = max(1, len(own))
    if own and own == tuple(range(own[0], own[0] + step)) and own[0] % step == 0:
        return [tuple(range(start, min(samples, start + step))) for start in range(0, samples, step)]
    return [own]


def _of_chosen(cotangent: Tensor, layout: Layout, chosen: Tensor) -> Tensor:
    """A cotangent ``[v, *y]`` that is zero for all samples but some."""
    if layout.axis is None:
        return cotangent
    mask = torch.isin(layout.sample_of(cotangent.device), chosen.to(cotangent.device))
    return cotangent * mask.view([-1 if axis == layout.axis + 1 else 1 for axis in range(cotangent.dim())])


def differentiable_outputs(returned: Any) -> list[Tensor]:
    """The tensors in what a function has returned that can have gradients."""
    return [y for y in tensors_in(returned) if y.is_floating_point() or y.is_complex()]


def _of_samples(tensor: Tensor, layout: Layout, skip: int, index: Tensor) -> Tensor:
    """The parts of some samples ``[*skipped, n, *shape]``, where the axis of the samples is kept."""
    front = layout.to_front(tensor, skip).index_select(skip, index.to(tensor.device))
    return front.unsqueeze(skip + 1 + (layout.axis or 0)) if layout.parts == 1 else front


def _cuts(inputs: Sequence[Tensor], weight: Tensor, axis: int, extent: int) -> Iterator[list[int | None]]:
    """Ways to cut the inputs: along the axis of the output, the same from behind, any axis of this extent."""

    def same(tensor: Tensor) -> int | None:
        return axis if tensor.dim() > axis and tensor.shape[axis] == extent else None

    def anywhere(tensor: Tensor) -> int | None:
        if (known := same(tensor)) is not None:
            return known
        return next((place for place, size in enumerate(tensor.shape) if size == extent), None)

    tried: list[list[int | None]] = []
    for choose in (same, anywhere):
        axes = [None if tensor is weight else choose(tensor) for tensor in inputs]
        if any(place is not None for place in axes) and axes not in tried:
            tried.append(axes)
            yield axes
