"""One monitored backward pass: it computes quantities, and removes them from the parameters at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from packprop.applications.reports.profile.quantities import SampleGGNTrace
from packprop.engine.algebra import CAT, along, sq_norm, total_grad
from packprop.engine.context import Backpack
from packprop.engine.curvature import hessian_product, vjp
from packprop.engine.distributed import AllRanks, JointPass
from packprop.engine.graph import Graph, walk
from packprop.engine.passes import ChunkSizes, samples_of_nothing
from packprop.engine.recording import EXTENDED, disable, is_running, marks_of
from packprop.engine.tensors import named_parameters
from packprop.engine.user_pass import BackwardCall
from packprop.errors import PackpropError
from packprop.types import GRADIENT, Extension, Row

MONITORED = "packprop.monitored"
"""Key in the metadata of a node: an object that stands for the last pass of a step that has begun there."""


@dataclass(frozen=True, eq=False)
class GradientAndNorms(Extension):
    """The gradient ``[*p]``, squared norms of its rows ``[n]``, and the rows' products with it ``[n]``.

    Args:
        products: Compute the third, which takes a second pass.
    """

    products: bool = True
    savefield: ClassVar[str] = "_packprop_monitored"

    @property
    def rows(self) -> tuple[Row, ...]:
        """Two statistics, and one that needs the first."""
        both = (Row(GRADIENT, total_grad), Row(GRADIENT, sq_norm, over_n=CAT[0], degree=2))
        if not self.products:
            return both
        # the second pass goes along the gradient as it is
        return (*both, Row(GRADIENT, along, over_n=CAT[0], degree=2, after=list))

    @property
    def name(self) -> str:
        """Name in messages."""
        return "Monitor"

    def finish(self, values: list[Any], samples: int) -> list[Tensor]:
        """Return the gradient, norms and products."""
        return values


@dataclass
class PassValues:
    """The results of one backward pass, for the loss without the factor of a gradient scaler.

    Args:
        samples: The number of its samples.
        own: This rank's samples among them.
        squares: By name of the parameter, squared norms of samples' rows ``[n]``.
        products: Inner products of the rows with the gradient ``[n]``; empty if not computed.
        traces: Traces of samples' GGN blocks ``[n]``; empty if not computed.
        sharpness: Curvature along the gradient; ``None`` if it was not computed, or the gradient is zero.
    """

    samples: int
    own: range
    squares: dict[str, Tensor]
    products: dict[str, Tensor]
    traces: dict[str, Tensor]
    sharpness: float | None = None


class MonitoredPass(Backpack):
    """``backpack(...)`` that keeps the results of each backward pass, and leaves nothing on parameters.

    ``brought`` has the values of one pass after the other, ``gradients`` the sum of their gradients.

    Args:
        model: The model to measure.
        trace: The extension for GGN traces, or ``None``.
        products: Compute samples' products with the gradient.
        sharpness: Compute the curvature along the gradient.
        ranks: Says whose samples count.
        loss_scale: The factor of a gradient scaler on the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        trace: SampleGGNTrace | None,
        *,
        products: bool,
        sharpness: bool,
        ranks: str | AllRanks,
        loss_scale: float | Tensor,
    ) -> None:
        self._noise, self._trace, self._sharpness = GradientAndNorms(products), trace, sharpness
        asked: list[Extension] = [self._noise, *([] if trace is None else [trace])]
        super().__init__(asked, None, None, False, loss_scale, ranks)
        # the results of a first pass stay as they are in a pass, so values are divided by the factor when they
        # are taken off
        self._scale = self._options.loss_scale
        self._options = replace(self._options, loss_scale=None)
        self._parameters = {
            name: parameter for name, parameter in named_parameters(model) if parameter.requires_grad
        }
        self._reached: list[Any] = []
        self._latest = object()
        self._counted: list[object] = []
        """Objects that stand for the current pass, and for the completed ones."""
        self.brought: list[PassValues] = []
        self.gradients: dict[str, Tensor] = {}
        self.gives_up = self._has_failed = False
        """Leave passes after a failed one unwatched; and a flag that one has failed."""
        self.owner: FrameType | None = None
        """The Python frame of the step, if that is known: no pass is watched after it has been left."""

    @property
    def given_up(self) -> bool:
        """Tell whether the step has failed, in a backward pass or elsewhere: no pass belongs to it any more."""
        if self.owner is not None and not is_running(self.owner):
            self._has_failed, self.owner = True, None
        return self._has_failed

    def __exit__(self, *error: Any) -> None:
        self._seen = True  # the monitor says it in other words
        super().__exit__(*error)

    def _chunk_sizes(self, graph: Graph) -> ChunkSizes:
        """Return the sizes of any pass; note the tensors on which values will be saved, and mark the nodes."""
        marks = [marks_of(node) for use in graph.uses for node in use.anchors]
        if any(mark.get(MONITORED) in self._counted for mark in marks):
            raise PackpropError(
                "Monitor: a step was to be monitored.",
                "two backward passes through one forward pass",
                "passes of a step must have different samples, and these samples would count twice",
                "add the losses up, and call backward() once",
            )
        for mark in marks:
            mark[MONITORED] = self._latest
        self._reached = [graph.home(leaf) for leaf in graph.leaves()]
        return super()._chunk_sizes(graph)

    def _backward(self, call: BackwardCall, backward: Callable[[], None]) -> None:
        """Run a pass, and remove its results from the parameters."""
        if self.given_up:
            return backward()
        self._has_failed = self.gives_up
        sharpness = None
        if self._sharpness and not call.is_plain:
            has_entries = samples_of_nothing(walk(call.roots, call.gradients, call.leaves)) is None
            sharpness = self._curved(call) if has_entries else None
        self._reached, self._latest = [], object()
        complete = False
        try:
            super()._backward(call, backward)
            complete = True
            self._counted.append(self._latest)
        finally:
            values = self._take_off(complete)
        self._has_failed = False
        if values is not None:
            values.sharpness = sharpness
            self.brought.append(values)

    def _pass(self, call: BackwardCall, backward: Callable[[], None], joint: JointPass | None) -> None:
        super()._pass(call, backward, joint)
        # values of all ranks, or of no samples, are also on parameters whose chunks nobody asked about
        self._reached += [parameter for module in EXTENDED for parameter in module.parameters()]

    def _take_off(self, complete: bool) -> PassValues | None:
        """Remove all values; return those of a complete pass, ``None`` if no parameter of the model has any."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        values = PassValues(0, range(0), {}, {}, {})
        for home in self._reached:
            found = vars(home).pop(self._noise.savefield, None)
            trace = None if self._trace is None else vars(home).pop(self._trace.savefield, None)
            name = names.get(id(home))
            if name is None or found is None or not complete:
                continue
            gradient, squares, *products = found
            before = self.gradients.get(name)
            gradient = self._meant(gradient, 1)
            self.gradients[name] = gradient if before is None else before + gradient
            values.squares[name] = self._meant(squares, 2)
            if products:
                values.products[name] = self._meant(products[0], 2)
            if trace is not None:
                values.traces[name] = self._meant(trace, 1)
        self._reached = []
        if not values.squares:
            return None
        values.samples = len(next(iter(values.squares.values())))
        values.own = range(values.samples) if self._options.ranks is None else self.rows
        return values

    def _curved(self, call: BackwardCall) -> float | None:
        """Return ``g^T H g / g^T g`` of the loss before its backward pass, the only one of the step."""
        loss, parameters = call.roots[0], list(self._parameters.values())
        asked = "Monitor(quantities=[..., 'sharpness']): the curvature along the gradient was asked for."
        if len(call.roots) != 1 or call.gradients[0] is not None or loss.numel() != 1:
            raise PackpropError(
                asked,
                "backward() of several tensors, or with a gradient",
                "the sharpness is the curvature of a single loss",
                "call loss.backward() on one number, or leave 'sharpness' out",
            )
        if any(each.samples for each in self.brought):
            raise PackpropError(
                asked,
                "a second backward pass in one step",
                "the sharpness is along the gradient of the whole step, which no single pass has",
                "call backward() once in a step, or leave 'sharpness' out",
            )
        with disable():
            gradient = vjp(loss, parameters, torch.ones_like(loss))
            product, _ = hessian_product("Monitor", loss, parameters)
            curved = product([part[None] for part in gradient])
        pairs = list(zip(gradient, curved, strict=True))
        inner = _summed([(a.double() * b[0].double()).sum() for a, b in pairs])
        square = _summed([a.double().square().sum() for a in gradient])
        return float(self._meant(inner / square, 1)) if square > 0 else None

    def _meant(self, value: Tensor, degree: int) -> Tensor:
        """Return a value for the loss without its factor, given the power with which the value grows."""
        scale = self._scale
        if scale is None:
            return value
        return value / (scale.to(value.device) if isinstance(scale, Tensor) else scale) ** degree


def _summed(numbers: Sequence[Tensor]) -> Tensor:
    return torch.stack([number.cpu() for number in numbers]).sum()
