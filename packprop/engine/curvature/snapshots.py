"""Snapshots of tensors, which show whether they changed later, and the leaves that each product reads."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from packprop.engine.functions.nodes import CONVOLUTIONS, PRODUCTS, SCALING, name_of_node
from packprop.engine.functions.operands import WITH_SUMMAND, saved_tensors
from packprop.engine.functions.saved import keeps_elsewhere
from packprop.engine.graph.graph import Graph
from packprop.engine.recording.marks import EXTENDED
from packprop.engine.tensors.dry import has_fault, is_dry_run
from packprop.engine.tensors.state import version


class Snapshot(NamedTuple):
    """The state of a tensor at the time of a computation, which shows whether it changed later.

    Args:
        tensor: The tensor.
        storage: The address of its data.
        version: Its version, which counts changes in place.
        entries: Some of its entries, because changes through ``.data`` do not change the version.
    """

    tensor: Tensor
    storage: int
    version: int
    entries: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> Snapshot:
        """Take a snapshot of a tensor."""
        return cls(
            tensor, 0 if is_dry_run() else tensor.data_ptr(), version(tensor), _some_entries(tensor).clone()
        )

    @property
    def is_outdated(self) -> bool:
        """True if the tensor has changed since then; waits for the device."""
        now = Snapshot.of(self.tensor)
        if (now.storage, now.version) != (self.storage, self.version):
            return True
        equal = (now.entries == self.entries) | (now.entries.isnan() & self.entries.isnan())
        return has_fault(~equal.all())


def _some_entries(tensor: Tensor, most: int = 64) -> Tensor:
    """Return some entries spread over a tensor, ``[k]``; all entries if there are few."""
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // most)]


def snapshots_of(tensors: Iterable[Tensor]) -> list[Snapshot]:
    """Take snapshots of tensors."""
    return [Snapshot.of(tensor) for tensor in tensors]


def were_changed(snapshots: Sequence[Snapshot]) -> bool:
    """Tell whether one of the tensors has changed, as far as its snapshot shows."""
    return any(snapshot.is_outdated for snapshot in snapshots)


def frozen_parameters(nodes: Iterable[Node]) -> list[Tensor]:
    """Return frozen parameters of extended modules that nodes have saved, and that products therefore read."""
    places = {
        saved.untyped_storage().data_ptr()
        for node in nodes
        if not keeps_elsewhere(node)
        for saved in saved_tensors(node)
        if saved.layout is torch.strided
    }
    own = {id(each): each for module in EXTENDED for each in module.parameters() if not each.requires_grad}
    strided = (each for each in own.values() if each.layout is torch.strided)
    return [each for each in strided if each.untyped_storage().data_ptr() in places]


def read_by_products(graph: Graph, leaves: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return for each leaf the leaves that the product with its block reads: changing them makes it wrong.

    A product differentiates the nodes between its parameter and the roots, and reads the tensors that these
    nodes saved, such as the weights downstream. You may change its own weight, and weights upstream.
    """
    everything = [list(leaves) for _ in leaves]
    bits = {id(leaf): 1 << place for place, leaf in enumerate(leaves)}
    in_storage: dict[int, list[Tensor]] = {}
    for leaf in leaves:
        if not leaf.is_sparse:
            in_storage.setdefault(leaf.untyped_storage().data_ptr(), []).append(leaf)
    masks: dict[Node, int] = {}
    readers = {id(leaf): 0 for leaf in leaves}
    for node in graph.order:
        variable = getattr(node, "variable", None)
        slots = [0 if above is None else masks[above] for above, _ in node.next_functions]
        masks[node] = functools.reduce(int.__or__, slots, bits.get(id(variable), 0))
        if not masks[node] or variable is not None:
            continue
        if isinstance(node, BackwardCFunction) or "Backward" not in node.name():  # it may hold anything
            return everything
        if keeps_elsewhere(node):  # a recomputation reads all parameters again
            return everything
        for saved in saved_tensors(node):
            if saved.layout != leaves[0].layout:
                continue
            for leaf in in_storage.get(saved.untyped_storage().data_ptr(), ()):
                (start, stop), (begin, end) = _extent(leaf), _extent(saved)
                if start < end and begin < stop:
                    readers[id(leaf)] |= _readers(name_of_node(node), slots, bits[id(leaf)])
    return [[each for each in leaves if readers[id(each)] & bits[id(leaf)]] for leaf in leaves]


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the places in the storage of a tensor's first entry, and after its last entry."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start, start + (1 + last) * bool(tensor.numel())


def _readers(name: str, slots: Sequence[int], own: int) -> int:
    """Return the leaves, as bits, whose products read a leaf that a node has saved.

    A product's derivative in one operand reads the other operand. Its derivative in a summand reads neither.

    Args:
        name: Name of the node.
        slots: The leaves that each of its inputs depends on, as bits.
        own: The bit of the leaf that it has saved.
    """
    read = slots
    if name in SCALING:  # the derivatives in scale and shift read neither
        read = slots[:1]
    elif name in PRODUCTS and sum(bool(slot & own) for slot in slots) == 1:
        first, last = name in WITH_SUMMAND or name == "Addcmul", name in CONVOLUTIONS or name == "Linear"
        summand = 0 if first else 2 if last else None  # it comes before the two operands, or after them
        read = [slot for place, slot in enumerate(slots) if place != summand and not slot & own]
    return functools.reduce(int.__or__, read, 0)
