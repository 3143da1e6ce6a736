"""Where the tensors of a forward pass come from: from the samples, or from parameters alone.

# NOTE [What depends on the samples]
While a forward pass is recorded, tensors are told apart by where they come from: those computed from the
inputs of the outermost call *depend on the samples*; those computed from parameters and constants alone do not.
A function that takes one of each kind is where a parameter meets the samples: a use. ``mask * weight`` is none,
``x * weight`` is one, although to autograd they look alike when ``x`` needs no gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from packprop.functions.reorderings import REORDERINGS, axes_reordered
from packprop.functions.traits import EXPANSIONS
from packprop.recording.compiled import is_compiled_region
from packprop.recording.marks import USE, marks_of, nodes_above
from packprop.tensors.nesting import tensors_in


class TensorSet:
    """Tensors by identity, without keeping them alive."""

    def __init__(self) -> None:
        self.references: dict[int, weakref.ref[Tensor]] = {}
        """By identity: ``sort`` looks here without a call, because it is asked for every argument."""

    def __contains__(self, tensor: object) -> bool:
        reference = self.references.get(id(tensor))
        return reference is not None and reference() is tensor

    def add(self, tensor: Tensor) -> None:
        """Add one tensor."""
        self.references[id(tensor)] = weakref.ref(tensor)

    def add_all(self, value: Any) -> None:
        """Add the tensors in what a function returned."""
        if isinstance(value, Tensor):
            self.add(value)
        else:
            for tensor in tensors_in(value):
                self.add(tensor)

    def __bool__(self) -> bool:
        return bool(self.references)

    def __iter__(self) -> Iterator[Tensor]:
        """The tensors that are still there."""
        for reference in list(self.references.values()):
            tensor = reference()
            if tensor is not None:
                yield tensor


Sorted = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""Arguments that depend on samples, trainable ones that do not, and constants."""


class Provenance:
    """Which tensors of a forward pass depend on the samples, and which are made of parameters alone."""

    def __init__(self) -> None:
        self.sizes: Sequence[torch.Size] = ()
        """Shapes of the inputs of the call that is recorded, which may still get more."""
        self.from_samples, self.from_parameters = TensorSet(), TensorSet()
        self.reordered = TensorSet()
        """Those that depend on the samples through a function that takes rows out of their order."""
        self.counted = TensorSet()
        """Indices that count rows from the first one on."""

    def alive(self) -> Iterator[Tensor]:
        """All of these tensors that are still there."""
        yield from self.from_samples
        yield from self.from_parameters

    def sort(self, tensors: Iterable[Tensor]) -> Sorted:
        """Tell arguments that depend on samples, trainable ones that do not, and constants apart."""
        samples: list[Tensor] = []
        parameters: list[Tensor] = []
        constants: list[Tensor] = []
        references = self.from_samples.references
        for tensor in tensors:
            reference = references.get(id(tensor))
            if reference is not None and reference() is tensor:
                samples.append(tensor)
            elif not tensor.requires_grad:
                constants.append(tensor)
            elif tensor.is_leaf or tensor in self.from_parameters or not self._comes_from_samples(tensor):
                if not (parameters and any(tensor is known for known in parameters)):
                    parameters.append(tensor)
            else:
                self.from_samples.add(tensor)
                samples.append(tensor)
        return samples, parameters, constants

    def may_hold_samples(self, shape: Iterable[int]) -> bool:
        """Whether an axis has room for the samples, which are on the leading axis of some input."""
        leading = {size[0] for size in self.sizes if len(size)}
        return not leading or any(extent % samples == 0 for extent in shape for samples in leading if samples)

    def note_order(
        self,
        function: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        samples: Iterable[Tensor],
        out: Any,
    ) -> bool:
        """Note what was made of samples, if it may be in another order; say whether they were before."""
        before = bool(self.reordered.references) and any(tensor in self.reordered for tensor in samples)
        if before or (function in REORDERINGS and self._reorders_samples(function, args, kwargs, out)):
            self.reordered.add_all(out)
        return before

    def _reorders_samples(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> bool:
        axes = axes_reordered(function, args, kwargs, self.counted)
        made = next(tensors_in(out), None)
        if axes is None or made is None:
            return True
        if axes == {made.dim() - 1} and made.dim() > 1:  # features, or positions
            return False
        extents = {extent for size in self.sizes for extent in size[:2] if extent > 1}
        taken, last = args[0].shape, max(axes, default=0)  # lists of rows stand for one axis, or for several
        rows = [*taken[min(axes, default=0) : last + 1], *(made.shape[axis] for axis in axes)] if axes else []
        return any(each % extent == 0 for each in rows for extent in extents) or bool(axes and not extents)

    def follow(self, args: tuple[Any, ...], out: Tensor) -> None:
        """Sort what was made of the arguments, which is no use of them."""
        samples, parameters, _ = self.sort(tensors_in(args))
        if samples:
            self.from_samples.add(out)
            self.note_order(None, args, {}, samples, out)
        elif parameters:
            self.from_parameters.add(out)

    def _comes_from_samples(self, tensor: Tensor) -> bool:
        """Whether a tensor that no torch function was seen to make depends on the samples, by its graph."""
        assert tensor.grad_fn is not None
        for node in nodes_above([tensor.grad_fn]):
            if USE in marks_of(node) or is_compiled_region(node):
                return True
            leaf = getattr(node, "variable", None)
            if leaf is not None and leaf in self.from_samples:
                return True
        self.from_parameters.add(tensor)
        return False


class Expansions:
    """Tensors that are parameters expanded to a larger shape, and what they were expanded from."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def note(self, function: Callable[..., Any], args: tuple[Any, ...], out: Any) -> None:
        """Note what a call has returned, if the function expands its arguments."""
        if function not in EXPANSIONS:
            return
        for source, expanded in zip(tensors_in(args), tensors_in(out), strict=False):
            axes = zip(reversed(source.shape), reversed(expanded.shape), strict=False)
            if all(extent in (1, larger) for extent, larger in axes):
                self._sources[id(expanded)] = (weakref.ref(expanded), self.source(source))

    def source(self, tensor: Tensor) -> Tensor:
        """What a tensor was expanded from, or the tensor itself."""
        reference, source = self._sources.get(id(tensor), (None, tensor))
        return source if reference is not None and reference() is tensor else tensor
