"""A function called on each sample's part of its inputs, instead of pulled back once for each sample.

# NOTE [Calls of single samples]
Nothing says which axis of an input holds the samples. So inputs are cut by their shapes, and the cut is tried
out: gradients of single samples, with random cotangents, must add up to what autograd pulls back from the whole
batch. Both are linear in the cotangents, and random numbers hide no difference between linear maps; so if they
agree, then the rows of each sample are right, for the inputs of this very call. If they do not, or the function
does not take a part of its inputs, each sample is pulled back through the whole batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

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


@dataclass
class SampleCalls:
    """Calls of one function on the inputs of single samples.

    Args:
        function: The function.
        pull: Pulls columns back.
        axes: Which cut has been tried out: for each input the axis that holds the samples, or ``None``; empty
            if no cut fits.
    """

    function: Callable[..., Any]
    pull: Pull
    axes: list[int | None] | None = field(default=None, init=False)

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
        if layout.axis is None or layout.samples == 1:
            return None
        inputs = list(tensors_in(arguments))
        extent = layout.samples * layout.parts
        if self.axes is None:
            self.axes = []
            for axes in _cuts(inputs, weight, layout.axis, extent):
                if self._fits(axes, arguments, weight, outputs, cotangents, layouts, len(index)):
                    self.axes = axes
                    break
        return self._rows(self.axes, arguments, weight, cotangents, layouts, index) if self.axes else None

    def _fits(
        self,
        axes: list[int | None],
        arguments: Arguments,
        weight: Tensor,
        outputs: Sequence[Any],
        cotangents: Cotangents,
        layouts: Sequence[Layout],
        at_once: int,
    ) -> bool:
        """Whether gradients of single samples add up to that of the whole batch; see the note above."""
        generator = torch.Generator().manual_seed(0)
        noise = [
            None if each is None else torch.randn(1, *each.shape[1:], generator=generator).to(each)
            for each in cotangents
        ]
        total = scale = torch.zeros_like(weight, requires_grad=False)
        numbers = torch.arange(layouts[0].samples, device=weight.device).split(at_once)
        for index in numbers[: 1 if is_dry_run() else None]:
            try:
                rows = self._rows(axes, arguments, weight, noise, layouts, index)
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
        axes: list[int | None],
        arguments: Arguments,
        weight: Tensor,
        cotangents: Cotangents,
        layouts: Sequence[Layout],
        index: Tensor,
    ) -> Tensor | None:
        parts = [
            tensor if axis is None else _of_samples(tensor, layouts[0]._replace(axis=axis), 0, index)
            for axis, tensor in zip(axes, tensors_in(arguments), strict=True)
        ]
        columns = [
            None if each is None else _of_samples(each, layout, 1, index)
            for each, layout in zip(cotangents, layouts, strict=False)
        ]
        together = self._vectorised(axes, arguments, weight, parts, columns, len(index))
        if together is not None:
            return together
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
