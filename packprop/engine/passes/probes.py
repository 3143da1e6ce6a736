"""Probe rows: samples that go through a pass with the others, but do not count in gradients and sums.

# NOTE [Probe rows]
A pass over training samples and probes together has the cotangents of both. Statistics take the rows of one
group, as they do for chosen samples (``subsampling``). packprop rescales them to a loss over that group alone:
it replaces the divisor of a mean over all rows by the divisor of a mean over the group. Gradients are sums over
training rows. autograd cannot leave rows out of a weight's gradient while it pulls their cotangents back. So
packprop makes one sweep that computes no gradient of a weight, sums the gradients itself, and hands them to the
nodes of the leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packprop.engine.algebra.monoid import rescale
from packprop.engine.algebra.statistics import gram
from packprop.engine.functions.losses.description import divisors
from packprop.engine.graph.graph import Graph
from packprop.engine.tensors.device import tensor_of
from packprop.engine.tensors.precision import wider_dtype
from packprop.errors import BadInput, PackpropError
from packprop.types import Extension, Row

SUFFIX = "_probes"
"""The suffix of an extension's attribute for the values of probes."""

SEEDS = ("gradient", "ggn", "empirical", "jacobian", "none")
"""Seeds whose cotangents belong to samples."""


ASKED = "probes=... was asked for."
"""The request that errors name."""

INSTEAD = "leave it out, or take a pass over the probes alone, with gradients of its own"
"""The advice that errors give."""


@dataclass(frozen=True)
class Groups:
    """The samples of a pass, divided into training rows and probes.

    Args:
        training: Indices of training samples, in order.
        probes: Indices of probes, in the order in which you gave them.
        of_training: The factor from the loss to a loss over training samples alone.
        of_probes: The factor from the loss to a loss over probes alone.
    """

    training: list[int]
    probes: list[int]
    of_training: Tensor | float
    of_probes: Tensor | float


class OfGroup(Extension):
    """An extension for the rows of one group.

    Args:
        of: The extension.
        chosen: Indices of the samples.
        factor: The factor on the loss.
        suffix: The suffix of the attribute.
        cross: For products between samples, the number of first rows whose products with the other rows are
            kept; 0 for all products.
    """

    def __init__(
        self, of: Extension, chosen: list[int], factor: Tensor | float, suffix: str = "", cross: int = 0
    ) -> None:
        self._of, self._factor, self._cross = of, factor, cross
        self.subsampling = chosen
        vars(self).update(savefield=of.savefield + suffix, rounded=of.rounded, cheaper=of.cheaper)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The statistics of the extension."""
        return self._of.rows

    @property
    def name(self) -> str:
        """The name of the extension."""
        return self._of.name

    def finish(self, values: list[Any], samples: int) -> Any:
        """Return the value for a loss over the group alone."""
        degrees = self.degrees
        values = [
            None if value is None else rescale(value, _beside(value, self._factor), degree)
            for value, degree in zip(values, degrees, strict=True)
        ]
        value = self._of.finish(values, samples)
        return value[: self._cross, self._cross :] if self._cross else value


def _beside(value: Any, factor: Tensor | float) -> Tensor | float:
    """Move a factor to the device of a value."""
    return factor.to(value.device) if isinstance(factor, Tensor) and isinstance(value, Tensor) else factor


def require_alone(probes: Any, has_budget: bool, joins_ranks: bool) -> None:
    """Raise if probes are combined with a memory budget or with ranks.

    Raises:
        BadInput: With the argument that probes exclude.
    """
    instead = "leave one of the two out"
    if probes is not None and has_budget:
        raise BadInput(ASKED, "memory", "plans are made for passes without probes", instead)
    if probes is not None and joins_ranks:
        raise BadInput(ASKED, "ranks", "values of several ranks are merged without probes", instead)


def by_groups(
    graph: Graph, probes: Any, extensions: Sequence[Extension], is_plain: bool
) -> tuple[Sequence[Extension], Groups | None]:
    """Return the extensions of a pass, for training rows and for probes if there are probes.

    Args:
        graph: The graph of the pass, with its samples located.
        probes: Indices of probes or a mask; ``None`` for no probes.
        extensions: The requested extensions.
        is_plain: Whether the pass is ``backward()`` without options, and not traced.

    Raises:
        PackpropError: For extensions and passes that cannot leave probes out.
    """
    if probes is None:
        return extensions, None
    _require_separable(graph, extensions)
    if not is_plain:
        raise PackpropError(
            ASKED,
            "backward(create_graph=True), backward(inputs=...) or a compiled step",
            "with probes, packprop computes .grad outside of autograd's own pass, so these options have no "
            "effect on it",
            "call backward() alone, or take a separate pass over the probes",
        )
    groups = groups_of(graph, probes)
    return for_groups(extensions, groups), groups


def for_groups(extensions: Sequence[Extension], groups: Groups) -> tuple[Extension, ...]:
    """Return each extension for the training rows and for the probes.

    An extension of products between samples has the products within the training rows, and those between
    training rows and probes.
    """
    found: list[Extension] = []
    for extension in extensions:
        found.append(OfGroup(extension, groups.training, groups.of_training))
        if any(row.statistic is gram for row in extension.rows):
            both = groups.of_training * groups.of_probes
            factor = both**0.5  # products grow with its square
            chosen = [*groups.training, *groups.probes]
            found.append(OfGroup(extension, chosen, factor, SUFFIX, cross=len(groups.training)))
        else:
            found.append(OfGroup(extension, groups.probes, groups.of_probes, SUFFIX))
    return tuple(found)


def groups_of(graph: Graph, probes: Any) -> Groups:
    """Divide the samples of a pass into training rows and probes.

    Raises:
        BadInput: For probes that are not some of the samples.
        PackpropError: For a loss whose divisor is not known.
    """
    chosen = indices_of(probes, graph.samples)
    training = [index for index in range(graph.samples) if index not in set(chosen)]
    if not training:
        raise BadInput(
            ASKED,
            "probes",
            f"they are all of the {graph.samples} samples of the batch: there is none to train on",
            "give the indices of some, or leave probes out",
        )
    factors: list[list[Tensor | float]] = []
    if any(loss.call.released for loss in graph.losses):
        raise _not_known("a loss whose arguments an earlier pass has freed")
    for loss in graph.losses:
        call = loss.call
        known = divisors(call.function, call.args, call.kwargs, loss.layout, [training, chosen])
        if known is None:
            raise _not_known(f"the loss {call.name}")
        whole, *parts = (_in_double(each) for each in known)
        factors.append([whole / part for part in parts])
    plain = all(not isinstance(each, Tensor) and each == 1 for pair in factors for each in pair)
    if graph.open or graph.without_loss or not factors or (len(factors) > 1 and not plain):
        what = (
            "a loss that is not one of torch" if len(factors) < 2 else f"{len(factors)} losses that are means"
        )
        raise _not_known(what)
    return Groups(training, chosen, factors[0][0], factors[0][1])


def _in_double(divisor: Tensor | float) -> Tensor | float:
    """Return a divisor in the widest precision of its device."""
    if not isinstance(divisor, Tensor):
        return float(divisor)
    wide = wider_dtype(torch.float32, divisor.device.type) or torch.float32
    return divisor.to(wide)


def _not_known(where: str) -> PackpropError:
    return PackpropError(
        ASKED,
        where,
        "packprop does not know what this loss would be divided by without the probes, so it does not know the "
        "scale of the training rows",
        "use one loss function of torch with reduction='mean' or 'sum'; or with 'none' and a reduction of your "
        "own, whose scale is kept as it is",
    )


def indices_of(probes: Any, samples: int) -> list[int]:
    """Return the indices of probes, given as indices or as a mask.

    Raises:
        BadInput: If they are neither.
    """
    try:
        tensor = tensor_of(list(probes) if isinstance(probes, range) else probes).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.empty(0, device="cpu")
    if tensor.dtype == torch.bool and tensor.shape == (samples,):
        tensor = tensor.nonzero().reshape(-1)
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    indices = (
        [index + samples if index < 0 else index for index in tensor.reshape(-1).tolist()] if whole else []
    )
    fits = tensor.dim() == 1 and all(0 <= index < samples for index in indices)
    if not indices or not fits or len(set(indices)) < len(indices):
        raise BadInput(
            ASKED,
            f"probes={probes!r}"[:200],
            f"they are no indices of different samples in the batch of {samples}, and no mask",
            f"give whole numbers from {-samples} to {samples - 1}, or one bool for each sample",
        )
    return indices


def _require_separable(graph: Graph, extensions: Sequence[Extension]) -> None:
    """Raise if an extension, or a part of the model, cannot leave probes out.

    Raises:
        PackpropError: With the extension or the part of the model.
    """
    for extension in extensions:
        if extension.subsampling is not None:
            where = f"extension {extension.name}(subsampling=...)"
            raise PackpropError(ASKED, where, "probes choose samples already", INSTEAD)
        if extension.of_batch or any(
            row.seed.kind not in SEEDS or row.seed.by_token or (row.whole and row.statistic is not gram)
            for row in extension.rows
        ):
            why = "it is not made of rows that belong to single samples of a batch"
            raise PackpropError(ASKED, f"extension {extension.name}", why, INSTEAD)
    require_no_other_pass(graph, ASKED, INSTEAD)


def require_no_other_pass(graph: Graph, asked: str, instead: str) -> None:
    """Raise if a part of the model needs autograd's own pass, because packprop sums gradients outside of it.

    Raises:
        PackpropError: With the part of the model.
    """
    if graph.hooks.are_inside:
        why = "it would see gradients of all samples, or would not be called"
        raise PackpropError(asked, "a hook on a tensor, a node or a module inside the model", why, instead)
