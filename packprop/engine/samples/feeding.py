"""Numbers that are fed in at the model's outputs, and the sizes that come back at the uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from packprop.engine.functions.losses import Loss, describe
from packprop.engine.functions.nodes import made_by
from packprop.engine.graph.graph import Graph, ReachedUse
from packprop.engine.graph.sweep import ONE_COLUMN_WITHOUT_INPUTS, SweepOptions, sweep
from packprop.engine.tensors.device import return_freed_pages
from packprop.engine.tensors.layout import Layout, as_matrix
from packprop.engine.tensors.precision import accumulation_dtype

UNMASKED = SweepOptions(needs_inputs=False, unmasked=True)

LARGE = 2**22
"""A sweep whose cotangents have at least this many entries returns the memory that it has freed."""

Fitting = dict[ReachedUse, list[list[Layout]]]
"""Ways in which each output of a use may hold the samples, the usual one first."""


Candidate = tuple[ReachedUse, int, Layout]
"""A use, the index of one of its outputs, and a layout that this output may have."""


Sizes = dict[Candidate, Tensor]
"""The size of the rows of each sample ``[n]``."""


def first_of(fitting: Fitting) -> list[list[Layout]]:
    """Return the first layout of each output of each use, which is the usual one."""
    return [[layouts[0] for layouts in places] for places in fitting.values()]


@dataclass(frozen=True)
class ModelOutput:
    """An output of the model where samples can be fed in.

    Args:
        loss: The known facts about the loss that took the output.
        decides: Whether the shape of the output decides on the number of samples.
        beside: The index of the output that is the first argument of the same loss, if this is another one,
            such as a target; else ``None``.
    """

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    loss: Loss
    decides: bool
    beside: int | None = None

    @classmethod
    def at(
        cls, edge: GradientEdge, loss: Loss | None = None, decides: bool = True, beside: int | None = None
    ) -> ModelOutput:
        """Describe a tensor inside the graph, given by its edge."""
        made = made_by(edge.node)[edge.output_nr]
        rule = loss or Loss(None, 1.0, None, None)
        return cls(edge, torch.Size(made.shape), made.dtype, made.device, rule, decides, beside)

    def ones(self) -> Tensor:
        """Return ones in the shape of the output, expanded from a single one."""
        return torch.ones((), dtype=self.dtype, device=self.device).expand(self.shape)


def model_outputs(graph: Graph) -> list[ModelOutput]:
    """Return the places where samples are fed in: inputs of losses, or outputs of the model if there are none.

    The inputs of recorded losses come first; then their other arguments, if the model made these as well; then
    the places where paths without any loss meet the model; see NOTE [Open paths].
    """
    calls = [(loss.call, loss.call.edge) for loss in graph.losses]
    outputs = [ModelOutput.at(edge, describe(call.function, call.args, call.kwargs)) for call, edge in calls]
    outputs += [
        ModelOutput.at(edge, decides=False, beside=place)
        for place, loss in enumerate(graph.losses)
        for edge in loss.others
    ]
    own = [edge for edge, forward, _ in graph.outputs if forward.has_parameters and not graph.losses]
    outputs += [ModelOutput.at(edge) for edge in own]
    return outputs + [ModelOutput.at(edge, decides=False) for edge in graph.open]


@dataclass(frozen=True)
class Feed:
    """Places where samples are fed in, with the layout of each, and the uses that sweeps go to from there."""

    outputs: Sequence[ModelOutput]
    layouts: Sequence[Layout]
    uses: Sequence[ReachedUse] = ()

    @property
    def edges(self) -> list[GradientEdge]:
        """The edges that the outputs came from."""
        return [output.edge for output in self.outputs]

    def noise(self) -> list[Tensor]:
        """Return random numbers in the shape and precision of each output, equal in each call."""
        generator = torch.Generator().manual_seed(len(self.outputs))
        return [
            torch.randn(each.shape, generator=generator, device="cpu").to(each.device, each.dtype)
            for each in self.outputs
        ]

    def ones(self, factors: Tensor) -> list[Tensor]:
        """Return ones for each output, each multiplied by the factor of its sample ``[n]``."""
        return self.by_sample([each.ones() for each in self.outputs], factors)

    def by_sample(self, given: Sequence[Tensor], factors: Tensor) -> list[Tensor]:
        """Return copies of numbers for each output, scaled as by ``scale``."""
        made = [numbers.clone() for numbers in given]
        self.scale(made, factors)
        return made

    def scale(self, given: Sequence[Tensor], factors: Tensor) -> None:
        """Multiply the numbers for each output in place, each by the factor of its sample ``[n]``."""
        for numbers, layout in zip(given, self.layouts, strict=True):
            own = factors.to(numbers.device, numbers.dtype.to_real())
            numbers.mul_(layout.broadcast(own, numbers.dim()))

    def sizes(
        self,
        seeds: Sequence[Tensor],
        fitting: Fitting,
        options: SweepOptions = ONE_COLUMN_WITHOUT_INPUTS,
        measure: Callable[[Tensor], Tensor] | None = None,
    ) -> Sizes:
        """Sweep the seeds, and return the sizes of the rows of samples ``[n]`` in each of the given layouts."""
        measured = measure or sizes_of
        sizes: Sizes = {}

        def visit(use: ReachedUse, cotangents: list[Tensor | None]) -> None:
            for index, layouts in enumerate(fitting.get(use, ())):
                cotangent = cotangents[index]
                if cotangent is None:
                    continue
                for layout in layouts:
                    sizes[use, index, layout] = measured(layout.to_front(cotangent, 1)[0])

        sweep(self.edges, seeds, self.uses, visit, options)
        if sum(shape.numel() for use in self.uses for shape in use.shapes) >= LARGE:
            return_freed_pages()  # the pass itself takes its memory in other pieces
        return sizes

    def sizes_of_nan(self, fed: Tensor, fitting: Fitting) -> Sizes | None:
        """Sweep NaN for samples ``fed`` ``[n]`` and zeros for others; return ``None`` if a function raises."""
        try:
            with torch.autograd.set_detect_anomaly(False):
                return self.sizes(self.ones(torch.where(fed, torch.nan, 0.0)), fitting, UNMASKED, _sums)
        except Exception:  # the user's function may raise anything
            return None


def sizes_of(rows: Tensor) -> Tensor:
    """Return the average size of the entries of each row ``[n, *]``: ``[n]``, on the CPU."""
    rows = rows.unsqueeze(-1)
    rest, wide = tuple(range(1, rows.dim())), accumulation_dtype(rows.dtype)
    sums = torch.linalg.vector_norm(rows, 1, rest, dtype=wide)  # copies nothing
    average: Tensor = sums / max(rows[:1].numel(), 1)
    return average.to("cpu", torch.float64)


def known_sizes_of(rows: Tensor) -> Tensor:
    """Return ``sizes_of`` rows, but zero for those below the smallest normal number, with too few digits."""
    sizes = sizes_of(rows)
    return sizes.where(~(sizes < torch.finfo(rows.dtype).tiny), 0)


def _sums(rows: Tensor) -> Tensor:
    """Return the sum of the entries of each row ``[n, *]``, NaN if one is NaN: ``[n]``, on the CPU."""
    return as_matrix(rows).sum(1).cpu()
