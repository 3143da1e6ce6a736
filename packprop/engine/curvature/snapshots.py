"""Snapshots of tensors, which show whether they changed after a computation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

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
        """True if the tensor has changed since; waits for the device."""
        now = Snapshot.of(self.tensor)
        if (now.storage, now.version) != (self.storage, self.version):
            return True
        equal = (now.entries == self.entries) | (now.entries.isnan() & self.entries.isnan())
        return has_fault(~equal.all())


def _some_entries(tensor: Tensor, most: int = 64) -> Tensor:
    """Return entries spread over a tensor ``[k]``; all of them if they are few."""
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // most)]


def snapshots_of(tensors: Iterable[Tensor]) -> list[Snapshot]:
    """Take snapshots of tensors."""
    return [Snapshot.of(tensor) for tensor in tensors]


def were_changed(snapshots: Sequence[Snapshot]) -> bool:
    """Tell whether one of the tensors has changed, as far as its snapshot shows."""
    return any(snapshot.is_outdated for snapshot in snapshots)
