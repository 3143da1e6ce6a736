"""Saving of finished values on parameters, and calls of the user's hook for modules that are done."""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from packprop.engine.algebra.kronecker import Eigen
from packprop.engine.algebra.monoid import rescale
from packprop.engine.graph.graph import Graph
from packprop.engine.tensors.nesting import map_tensors
from packprop.engine.tensors.precision import widest
from packprop.engine.tensors.sharding import placed_like
from packprop.engine.tensors.state import taken_over
from packprop.errors import BadInput, PackpropWarning
from packprop.types import Extension

Hook = Callable[[nn.Module], Any]
"""The user's extension hook: called with each module whose parameters have all their values."""

MOMENT = "of_pass_at"
"""The attribute of a saved tensor that tells its pass: parameters may hold values of several passes."""


class ResultSaver:
    """Saves the results of a pass on its leaves, and calls the hook of each module that is done.

    Args:
        graph: The graph of the pass.
        hook: The user's extension hook.
        loss_scale: The factor on the loss that was differentiated; ``None`` for 1.
    """

    def __init__(self, graph: Graph, hook: Hook | None, loss_scale: Tensor | float | None = None) -> None:
        self._graph, self._hook, self._loss_scale = graph, hook, loss_scale
        self._moment = time.monotonic_ns()
        self._waiting = [] if hook is None else graph.owners()
        self._skipped: dict[Extension, list[str]] = {}
        self._diagonal: dict[Extension, list[str]] = {}

    def take_off(self, extensions: Sequence[Extension], reuse: bool) -> dict[tuple[Extension, int], Tensor]:
        """Remove the results of an earlier pass; with ``reuse``, return the tensors that may be overwritten.

        # NOTE [Results in place]
        A training loop leaves the results of a step on the parameters until the next step replaces them.
        packprop removes them first, so that both are never alive at once. On a CPU the process pays for fresh
        memory page by page, which takes a large part of the time of per-sample gradients. There, packprop
        overwrites results that nobody else holds. It does not do so under a budget: such results would be alive
        from the start of the pass, when the step needs their memory for activations.
        """
        spare: dict[tuple[Extension, int], Tensor] = {}
        leaves, shards = self._graph.leaves(), self._graph.shards
        for extension in extensions:
            reused = reuse and grows(extension)
            for leaf in leaves:
                holder = [vars(shards.get(id(leaf), leaf)).pop(extension.savefield, None)]
                if reused and _may_be_overwritten(holder[0]):
                    old = taken_over(holder)
                    if old is not None:
                        spare[extension, id(leaf)] = old
        return spare

    def save(
        self,
        leaf: Tensor,
        results: dict[Extension, list[Any]],
        counts: Mapping[Extension, int] = MappingProxyType({}),
    ) -> None:
        """Save all values of one leaf; ``counts``: samples of each extension, if not those of the graph."""
        for extension, values in results.items():
            samples = counts.get(extension, self._graph.samples)
            if extension.subsampling is not None and extension not in counts:
                samples = len(extension.subsampling)
            meant = values if self._loss_scale is None else self._of_loss_meant(leaf, extension, values)
            value = extension.finish(meant, samples)
            if value is None:
                self._skipped.setdefault(extension, []).append(self._graph.name(leaf))
                continue
            dtype = extension.dtype_of(leaf.dtype)
            if isinstance(value, Tensor):
                value = _saved(value, dtype)
            elif not callable(value):  # products keep the tensors that they read unchanged
                if without_correlations(extension, value, leaf.shape):
                    self._diagonal.setdefault(extension, []).append(self._graph.name(leaf))
                value = map_tensors(functools.partial(_saved, dtype=dtype), value)
            home = self._graph.home(leaf)
            if home is not leaf and _is_of_parameter(extension, value, leaf):
                value = placed_like(value, home)
            save_of_pass(home, extension.savefield, value, self._moment)
        for module, unfinished in self._waiting:
            if id(leaf) in unfinished:
                unfinished.remove(id(leaf))
                if not unfinished and self._hook is not None:
                    self._hook(module)

    def _of_loss_meant(self, leaf: Tensor, extension: Extension, values: list[Any]) -> list[Any]:
        """Rescale the results of rows to the loss without the factor ``loss_scale``."""
        scale = self._loss_scale
        assert scale is not None
        if isinstance(scale, Tensor):
            scale = widest(scale, leaf.device)
        factor = 1 / scale
        return [rescale(value, factor, degree) for value, degree in zip(values, extension.degrees, strict=True)]

    def warn_of_large(self) -> None:
        """Warn of parameters that have no value, or a diagonal, because their factors would be too large."""
        for extension, names in self._diagonal.items():
            warn_of_diagonals(extension, names)
        for extension, names in self._skipped.items():
            warn_of_skipped(extension, names)


def save_of_pass(parameter: Tensor, savefield: str, value: Any, moment: int) -> None:
    """Save a value on a parameter; those of one pass are marked with one moment in nanoseconds."""
    if isinstance(value, Tensor):
        vars(value)[MOMENT] = moment
    setattr(parameter, savefield, value)


def moment_of(value: Any) -> int | None:
    """Return the moment that marks the pass of a saved value; ``None`` for one that no pass has saved."""
    return vars(value).get(MOMENT) if isinstance(value, Tensor) else None


def warn_of_skipped(extension: Extension, names: Sequence[str]) -> None:
    """Warn of parameters for which an extension has no value."""
    warnings.warn(
        f"{extension.name}: there is no {extension.savefield} for {', '.join(map(repr, names))}, whose factors "
        "would be too large; otherwise='diagonal' keeps their diagonals.",
        PackpropWarning,
        stacklevel=2,
    )


def without_correlations(extension: Extension, value: Any, shape: Sequence[int]) -> bool:
    """Tell whether a diagonal replaced a factor that was too large, without an option that allows it.

    The factor of a table's inputs does not count: it is diagonal, with an entry for each row of the table.
    """
    if getattr(extension, "otherwise", "") is not None:
        return False
    factors = value.vectors if isinstance(value, Eigen) else value if isinstance(value, list) else []
    for place, factor in enumerate(factors):
        if factor.dim() == 1 and (place == 0 or len(shape) != 2 or factor.shape[0] != shape[0]):
            return True
    return False


def warn_of_diagonals(extension: Extension, names: Sequence[str]) -> None:
    """Warn, once, of parameters with a diagonal in place of a factor that would be too large."""
    shown = ", ".join(map(repr, names[:6])) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    warnings.warn(
        f"{extension.name}: factors of more than 2^14 rows are kept as their diagonals, of {shown}. "
        "otherwise='diagonal' turns this warning off, 'skip' saves no such factors, 'error' raises an error.",
        PackpropWarning,
        stacklevel=2,
    )


def grows(extension: Extension) -> bool:
    """Tell whether a result has entries for samples or columns, so that it may be overwritten in place."""
    return not all(row.sums for row in extension.rows)


def _is_of_parameter(extension: Extension, value: Any, leaf: Tensor) -> bool:
    """Tell whether a value has an entry for each entry of a parameter, as sums and moments have."""
    summed = all(row.sums and not row.whole for row in extension.rows)  # else its rows belong to samples
    return isinstance(value, Tensor) and value.shape == leaf.shape and summed


def _may_be_overwritten(old: Any) -> bool:
    """Tell whether a result of an earlier pass is a CPU tensor that may be overwritten."""
    if type(old) is not Tensor or old.device.type != "cpu" or old.layout is not torch.strided:
        return False
    return not (old.requires_grad or old.is_inference())


def _saved(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous result in this precision; autograd must not see it as a view of a hidden tensor."""
    value = (value if value.dtype == dtype else value.to(dtype)).contiguous()
    return value if value.requires_grad else value.data


def factor_of(call: str, loss_scale: Any) -> float | Tensor | None:
    """Check and return the factor on the loss given to ``call``, without reading a tensor; ``None`` for 1.

    Raises:
        BadInput: If the factor is not a positive number, or a tensor of one entry.
    """
    if isinstance(loss_scale, Tensor) and loss_scale.numel() == 1 and loss_scale.is_floating_point():
        return loss_scale.detach().reshape(())
    is_number = isinstance(loss_scale, Real) and not isinstance(loss_scale, bool)
    if is_number and 0 < loss_scale < math.inf:
        return None if loss_scale == 1 else float(loss_scale)
    raise BadInput(
        f"{call}(loss_scale=...) was entered.",
        f"loss_scale={loss_scale!r}",
        "it is no positive number, and no tensor with one entry",
        "give what the loss was multiplied by: 1 / steps under accumulation, scaler.get_scale() of a scaler",
    )


@contextmanager
def set_aside(extensions: Sequence[Extension], parameters: Iterable[Tensor]) -> Iterator[None]:
    """Take gradients and results off parameters, and put them back afterwards."""
    fields = [extension.savefield for extension in extensions]
    before = [
        (tensor, tensor.grad, {name: vars(tensor).pop(name) for name in fields if name in vars(tensor)})
        for tensor in parameters
        if tensor.is_leaf
    ]
    for tensor, _, _ in before:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient, results in before:
            tensor.grad = gradient
            for name in fields:
                vars(tensor).pop(name, None)
            vars(tensor).update(results)
