"""Constants of a graph's nodes: which are data, and which are the model's own; see NOTE [Uses in the graph]."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import Node

from packprop.engine.functions.operands import saved_constants, saves_constants
from packprop.engine.functions.saved import keeps_elsewhere
from packprop.engine.recording.marks import EXTENDED, ForwardCall, called_modules
from packprop.engine.tensors.dry import is_of_batch, places_of


class Constants:
    """A test whether the constants that nodes have saved are data, or the model's own.

    Args:
        forwards: The calls of extended models that the pass goes through.
        own: References to the parameters and buffers of the models; ``None`` to look for them.
    """

    def __init__(
        self, forwards: Sequence[ForwardCall], own: Sequence[weakref.ref[Tensor]] | None = None
    ) -> None:
        self._forwards, self._given = forwards, own

    def tensors(self) -> list[Tensor]:
        """Return the parameters and buffers of the called models; of all extended ones, if no call is known."""
        if self._given is not None:
            return [tensor for reference in self._given if (tensor := reference()) is not None]
        modules = called_modules(self._forwards) or list(EXTENDED)  # all would cost each pass some time
        return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]

    @functools.cached_property
    def _memory(self) -> tuple[set[int], set[int]]:
        """The memory of parameters and buffers, and that of the models' inputs which are still alive."""
        own = {*places_of(self.tensors())} - {0}
        alive = [each for forward in self._forwards for reference in forward.storages if (each := reference())]
        inputs = {each.data_ptr() for each in alive}
        return own - inputs, inputs - own  # a batch that is part of a buffer, or a mask: the sweeps decide

    def of(self, node: Node) -> list[tuple[Tensor, bool | None]] | None:
        """Return the constants of a node, each with ``True`` if it is the model's own, ``False`` if it is data.

        A constant gets ``None`` if nothing shows which. Return ``None`` if an earlier pass has freed them.
        """
        try:
            constants = saved_constants(node)
        except RuntimeError:  # an earlier pass has freed them
            return None
        if not constants:
            return []
        found: list[tuple[Tensor, bool | None]] = []
        own, inputs = self._memory
        for tensor, place in zip(constants, places_of(constants), strict=True):
            is_data = place in inputs or is_of_batch(tensor) or tensor.is_nested
            is_own = not tensor.dim() or place in own or None
            found.append((tensor, False if is_data else is_own))
        return found

    def are_known(self, node: Node) -> bool | None:
        """Return ``True`` if no constant of a node is data, ``False`` if one is, ``None`` if some may be."""
        constants = None if keeps_elsewhere(node) else self.of(node)
        if constants is None:
            return None
        known = [is_own for _, is_own in constants]
        if False in known:
            return False
        return True if None not in known and saves_constants(node) else None
