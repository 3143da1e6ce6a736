"""A function and its arguments: cut into pieces, evaluated, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph

from packprop.engine.eager.choices import Choices, bad
from packprop.engine.tensors.hooks import NOTHING
from packprop.engine.tensors.nesting import map_instances, map_tensors
from packprop.engine.tensors.precision import accumulation_dtype
from packprop.engine.tensors.state import version
from packprop.errors import BadInput

Autocast = list[tuple[str, bool, torch.dtype]]


@dataclass
class Job:
    """A function, and how to cut its arguments and put them together; it holds no input."""

    fn: Callable[..., Tensor]
    choices: Choices
    specs: list[Any]  # per argument: itself, with gaps where its tensors were
    axes: list[int | None]  # per leaf: the axis to cut; None to pass it whole
    spans: list[tuple[int, int]]  # per piece: its start and its length
    autocast: Autocast
    named: bool  # whether the last argument is a dict of keyword arguments
    rows: frozenset[int] = frozenset()  # leaves whose rows have a factor each

    @property
    def weights(self) -> int | None:
        """The number of the leaf that holds the weights, if there are any: the last."""
        return None if self.choices["weights"] is None else len(self.axes) - 1

    @property
    def where(self) -> str:
        """The name of the function in errors."""
        return str(getattr(self.fn, "__qualname__", type(self.fn).__name__))

    @property
    def axis(self) -> int | None:
        """The axis to cut, if there is one."""
        cut = [axis for axis in self.axes if axis is not None]
        return cut[0] if cut and len(self.spans) > 1 else None

    def split(self, leaves: list[Tensor]) -> Iterator[tuple[int, int, list[Tensor]]]:
        """Yield start, length and leaves of each piece."""
        for start, length in self.spans:
            piece = list(leaves)
            if len(self.spans) > 1:
                for number, axis in enumerate(self.axes):
                    if axis is not None:
                        piece[number] = leaves[number].narrow(axis, start, length)
            yield start, length, piece

    def evaluate(self, piece: list[Tensor], length: int) -> Tensor:
        """Return the value of one piece, checked, with its weights and its share of a mean."""
        versions = [version(leaf) for leaf in piece]
        inputs = put_together(piece, self.specs)
        named = inputs.pop() if self.named else {}
        try:
            with surroundings(self.autocast):
                output = self.fn(*inputs, **named)
        except RuntimeError as error:
            if "leaf Variable" in str(error) and "in-place" in str(error):
                raise self._changed() from error
            raise
        if versions != [version(leaf) for leaf in piece]:
            raise self._changed()
        self._check_output(output, piece)
        mean = self.choices["reduction"] == "mean" and self.axis is not None
        if mean and output.ndim and self.axis == 0:
            why = "the values per sample of pieces are joined, not averaged"
            raise bad(f"reduction='mean' with {self.where}", why, "leave reduction out")
        if self.choices["weights"] is not None:
            output = (piece[-1] * output).sum()
        return output * (length / sum(n for _, n in self.spans)) if mean else output

    def join(self, values: list[Tensor]) -> Tensor:
        """Join the values of the pieces into one."""
        if len(values) == 1:
            return values[0]
        if values[0].ndim and self.axis == 0:
            return torch.cat(values)
        return torch.stack(values).sum(0, dtype=accumulation_dtype(values[0].dtype)).to(values[0].dtype)

    def seed(self, output: Tensor, cotangent: Tensor | None, start: int) -> Tensor | None:
        """Return the cotangent at the value of one piece; None stands for 1."""
        if cotangent is None:
            return torch.ones_like(output) if output.ndim else None
        if output.ndim and self.axis == 0:
            return cotangent.narrow(0, start, len(output))
        return cotangent

    def _changed(self) -> BadInput:
        why = "it changed an input in place, or another leaf, which others still use"
        return bad(self.where, why, "clone the input first, or use the out-of-place function")

    def _check_output(self, output: Any, piece: list[Tensor]) -> None:
        """Refuse outputs other than a scalar or one value per sample; record the leaves that hold samples."""
        if not isinstance(output, Tensor):
            several = isinstance(output, Sequence) and not isinstance(output, str)
            got = f"{len(output)} values" if several else f"a {type(output).__name__}"
            instead = "return one tensor: a scalar, or one value per sample"
            raise bad(self.where, f"it returned {got}, not one tensor", instead)
        if not output.is_floating_point():
            why = f"it returned {output.dtype}, through which no gradient flows"
            raise bad(self.where, why, "return a real floating point tensor")
        weights = self.choices["weights"]
        if output.ndim == 0 and weights is None:
            return
        cut = {
            number: leaf
            for number, (leaf, axis) in enumerate(zip(piece, self.axes, strict=True))
            if axis is not None and number != self.weights
        }
        rows = {number for number, leaf in cut.items() if output.shape == leaf.shape[:1]}
        trained = {number for number, leaf in cut.items() if leaf.requires_grad}
        if not (rows & trained or (rows and not trained)):
            shapes = ", ".join(str(list(leaf.shape)) for leaf in cut.values()) or "none"
            raise bad(
                self.where,
                f"it returned the shape {list(output.shape)}; inputs with samples: {shapes}",
                "return a scalar, or one value for each entry of axis 0 of an input",
            )
        if weights is not None:
            if output.shape != piece[-1].shape:
                why = f"{list(piece[-1].shape)} weights for values of shape {list(output.shape)}"
                raise bad("weights", why, "give one weight per sample")
            return
        if self.axis is not None and len({axis for axis in self.axes if axis is not None}) > 1:
            why = "with one value per sample, nothing tells which axis holds the samples"
            raise bad(f"axes={self.choices['axes']}", why, "transpose, so that one axis is cut")
        self.rows = frozenset(rows)


def prepare(
    fn: Callable[..., Tensor], inputs: tuple[Any, ...], named: dict[str, Any], choices: Choices
) -> tuple[Job, list[Tensor]]:
    """Return the job of one call, and the leaves of all its arguments, with the weights last."""
    axes, chunks, weights = choices["axes"], choices["chunks"], choices["weights"]
    if isinstance(axes, Sequence) and len(axes) != len(inputs):
        raise bad(f"{axes=}", f"there are {len(inputs)} inputs", "give one entry per input")
    specs: list[Any] = []
    leaves: list[Tensor] = []
    leaf_axes: list[int | None] = []
    for number, argument in enumerate((*inputs, named) if named else inputs):
        own_leaves, spec = take_apart(argument)
        axis = (*axes, None)[number] if isinstance(axes, Sequence) else axes
        specs.append(spec)
        leaves += own_leaves
        leaf_axes += [_axis(leaf, axis, strict=chunks is not None) for leaf in own_leaves]
    spans = [(0, 1)]
    if chunks is not None:
        pairs = zip(leaves, leaf_axes, strict=True)
        sizes = sorted({leaf.shape[axis] for leaf, axis in pairs if axis is not None})
        if len(sizes) != 1:
            why = f"the inputs' sizes along the axis to cut are {sizes}, not one number"
            instead = "let axes have one entry per input, None for those that are passed whole"
            raise bad(f"{axes=}", why, instead)
        count = max(1, min(chunks, sizes[0]))
        ends = [sizes[0] * piece // count for piece in range(count + 1)]
        spans = [(start, end - start) for start, end in pairwise(ends)]
    if weights is not None:
        leaves.append(weights)
        leaf_axes.append(0 if chunks is None or 0 in leaf_axes else None)
        if chunks is not None and leaf_axes[-1] == 0 and len(weights) != sizes[0]:
            raise bad("weights", f"{len(weights)} for {sizes[0]} samples", "give one weight per sample")
    for leaf in leaves:
        if type(leaf) in (Tensor, nn.Parameter) and freed(leaf):
            where = f"an input of shape {list(leaf.shape)}"
            raise bad(where, "its memory was freed", "call eager_backward before it is freed")
    kinds = {"cpu"} | {leaf.device.type for leaf in leaves}
    autocast = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds - {"meta"}
    ]
    return Job(fn, choices, specs, leaf_axes, spans, autocast, bool(named)), leaves


def _axis(leaf: Tensor, axis: int | None, strict: bool) -> int | None:
    if axis is None or isinstance(leaf, nn.Parameter):
        return None
    if -leaf.ndim <= axis < leaf.ndim:
        return axis % leaf.ndim
    if strict and leaf.ndim:
        why = f"an input of shape {list(leaf.shape)} has no such axis"
        raise bad(f"axes: {axis}", why, "let axes have one entry per input, None for this one")
    return None


class _Gap:
    """A placeholder for a tensor in an argument."""


def take_apart(argument: Any) -> tuple[list[Tensor], Any]:
    """Split an argument into its tensors and the rest."""
    leaves: list[Tensor] = []

    def taken_out(tensor: Tensor) -> _Gap:
        leaves.append(tensor)
        return _Gap()

    rest = map_tensors(taken_out, argument)
    return leaves, rest


def put_together(leaves: list[Tensor], specs: list[Any]) -> list[Any]:
    """Rebuild all arguments from their tensors."""
    rest = iter(leaves)
    return [map_instances(_Gap, lambda _: next(rest), spec) for spec in specs]


def freed(tensor: Tensor) -> bool:
    """Tell whether a tensor's memory was freed, as sharding does between uses."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    return tensor.untyped_storage().nbytes() == 0


# NOTE [What a branch must not share]
# Autocast keeps low-precision copies of parameters, with their piece of graph, for the rest of the
# forward pass. A branch that used such a copy would lead into the graph around it; a branch that left
# its own copy there would hand out a freed graph. Hooks on saved tensors, which checkpointing and
# offloading set, would evaluate the branch twice, or move its tensors.


def surroundings(autocast: Autocast, backward: bool = False) -> AbstractContextManager[Any]:
    """Restore autocast as it was at the call, or switch it off for gradients; disable saved-tensor hooks."""
    contexts: list[AbstractContextManager[Any]] = [
        torch.autocast(kind, dtype, enabled and not backward, cache_enabled=False)
        for kind, enabled, dtype in autocast
        if enabled or torch.is_autocast_enabled(kind)
    ]
    # Under hooks, even ones that do nothing, PyTorch no longer notices a change of a saved tensor: so this sets
    # hooks only if others are active. PyTorch 2.6 evaluates a branch inside a checkpoint once more.
    if _hooks_in_force() is not None:
        contexts.append(graph.saved_tensors_hooks(_same, _same))
    if not contexts:
        return NOTHING
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _hooks_in_force() -> Any:
    """Return the hooks that autograd applies to tensors that it saves now, if there are any.

    This calls a private function, because no public one tells. PyTorch 2.6 lacks it: the answer is None.
    """
    return None if _top is None else _top(False)


_top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
