"""Whether tensors were changed since something was computed from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from packprop.tensors.dry import has_fault, is_dry_run
from packprop.tensors.state import version


class Snapshot(NamedTuple):
    """What tells whether a tensor was changed since something was computed from it.

    Args:
        tensor: The tensor.
        storage: Where its data were.
        version: How often it had been changed in place.
        entries: Some of its entries: changes through ``.data`` do not change the version.
    """

    tensor: Tensor
    storage: int
    version: int
    entries: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> Snapshot:
        """A snapshot of a tensor as it is now."""
        return cls(
            tensor, 0 if is_dry_run() else tensor.data_ptr(), version(tensor), _some_entries(tensor).clone()
        )

    @property
    def is_outdated(self) -> bool:
        """Whether the tensor was changed since; waits for the device."""
        now = Snapshot.of(self.tensor)
        if (now.storage, now.version) != (self.storage, self.version):
            return True
        equal = (now.entries == self.entries) | (now.entries.isnan() & self.entries.isnan())
        return has_fault(~equal.all())


def _some_entries(tensor: Tensor, most: int = 64) -> Tensor:
    """Entries spread over a tensor ``[k]``; all of them if they are few."""
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // most)]


def snapshots_of(tensors: Iterable[Tensor]) -> list[Snapshot]:
    """Snapshots of tensors as they are now."""
    return [Snapshot.of(tensor) for tensor in tensors]


def were_changed(snapshots: Sequence[Snapshot]) -> bool:
    """Whether one of the tensors was changed since, as far as its snapshot tells."""
    return any(snapshot.is_outdated for snapshot in snapshots)
