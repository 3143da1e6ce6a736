"""Constants that nodes have saved: whether they are data, or the model's own."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from packprop.engine.functions.nodes import name_of_node
from packprop.engine.functions.operands import BY_DATA, saved_constants
from packprop.engine.functions.saved import keeps_elsewhere
from packprop.engine.recording.marks import EXTENDED, ForwardCall
from packprop.engine.tensors.dry import is_dry_run, is_of_batch, storage_key
from packprop.engine.tensors.state import storage_of


class Constants:
    """Tells whether the constants that nodes have saved are data.

    Args:
        forwards: The calls of extended models that the pass goes through.
        own: References to the parameters and buffers of extended models; ``None`` to look for them.
    """

    def __init__(
        self, forwards: Sequence[ForwardCall], own: Sequence[weakref.ref[Tensor]] | None = None
    ) -> None:
        self._forwards, self._given = forwards, own

    def tensors(self) -> list[Tensor]:
        """Return the parameters and buffers of extended models."""
        if self._given is not None:
            return [tensor for reference in self._given if (tensor := reference()) is not None]
        called = [module for forward in self._forwards if (module := forward.module()) is not None]
        modules = {id(module): module for module in [*called, *EXTENDED]}.values()
        return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]

    @functools.cached_property
    def _own(self) -> set[int]:
        """The memory of parameters and buffers."""
        return {*map(_place_of(), self.tensors())} - {0}

    @functools.cached_property
    def _inputs(self) -> set[int]:
        """The memory of the models' inputs."""
        return {each for forward in self._forwards for each in forward.storages} - self._own

    def are_known(self, node: Node) -> bool | None:
        """Return ``True`` if no constant of a node is data, ``False`` if one is, ``None`` if some may be."""
        if keeps_elsewhere(node):
            return None
        try:
            constants = list(saved_constants(node))
        except RuntimeError:  # an earlier pass has freed them
            return None
        missing = sum(above is None for above, _ in node.next_functions)
        known: bool | None = True if missing <= len(constants) else None  # sums do not save what they add
        for tensor, place in zip(constants, map(_place_of(), constants), strict=True):
            if place in self._inputs or is_of_batch(tensor) or tensor.is_nested:
                return False
            if tensor.dim() and place not in self._own and not _counts(node, tensor):
                known = None
        return known


def _place_of() -> Callable[[Tensor], int]:
    """Return the function that tells memory apart: a dry run has no addresses."""
    return storage_key if is_dry_run() else storage_of


def _counts(node: Node, index: Tensor) -> bool:
    """Tell in a dry run whether an index counts positions, which samples share; with data, the sweeps decide.

    An index without an axis for samples counts as one, because the batch does not decide on it.
    """
    is_index = not index.is_floating_point() and index.dtype != torch.bool
    is_shared = index.dim() < 2 or index.shape[0] == 1
    return is_dry_run() and name_of_node(node) in BY_DATA and is_index and is_shared
