"""The contents of a profile, apart from printing, drawing and files."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from packprop.applications.reports.profile.costs import MemoryUse
from packprop.applications.reports.profile.files import FORMAT
from packprop.applications.reports.profile.layers import Layer
from packprop.applications.reports.profile.outlying import OutlyingSample
from packprop.applications.reports.profile.shown import Shown
from packprop.applications.reports.profile.table import number_text
from packprop.errors import require_number


@dataclass(frozen=True)
class ProfileValues(Shown):
    """The values of a profile.

    Args:
        layers: One row for each module that owns trainable parameters, in the model's order.
        total: One row for all parameters together.
        loss: The mean loss over the data set.
        samples: Number of samples.
        batches: Number of batches that they came in.
        settings: Model, loss function, device, precision, mode, seed, draws, versions.
        seconds: Wall time of the pass over the data.
        tensors: ``gradient/<parameter>`` and ``gradient_variance/<parameter>`` (of single samples'
            gradients) ``[*p]``; ``sample_gradient_norm/<layer>`` and ``sample_ggn_trace/<layer>``
            (exact, if it was computed) ``[n]``, of each sample's own loss; for each Kronecker
            factor ``kfac/<parameter>/A`` (or ``B``) ``[i, i]``, and ``kfac_eigenvalues/...`` of the
            same name ``[i]``, ascending; ``outlying_sample/<place>``, the pictures of ``outlying``.
        outlying: The samples with the largest gradients, largest first.
        memory: The memory of the pass over the first batch, if it was measured.
        missing: The reasons why ``"outlying"`` or ``"memory"`` is missing.
    """

    layers: list[Layer]
    total: Layer
    loss: float
    samples: int
    batches: int
    settings: dict[str, Any]
    seconds: float
    tensors: dict[str, Tensor] = field(repr=False, compare=False, default_factory=dict)
    outlying: list[OutlyingSample] = field(default_factory=list)
    memory: MemoryUse | None = None
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def headline(self) -> str | None:
        """Return the warning to read before the numbers; ``None`` if the loss and its gradient are finite."""
        for name, value in (("loss", self.loss), ("gradient", self.total.gradient_norm)):
            if value is not None and not math.isfinite(value):
                says = "the values below say little about the model"
                return f"The {name} is not finite ({number_text(value)}): {says}."
        return None

    def norms_of(self, layer: Layer) -> Tensor | None:
        """Return the norm of each sample's gradient in a layer, or the total ``[n]``, if it is known."""
        return self.tensors.get(f"sample_gradient_norm/{layer.name}")

    def suspects(self, count: int = 20) -> list[int]:
        """Return places of the samples with the largest gradients, largest first: wrong labels are among them.

        A sample's gradient is large if the model disagrees with its label: because the label is wrong, or the
        sample is rare or hard. ``docs/gallery/mislabelled.md`` shows how many of the labels are wrong.

        Raises:
            BadInput: If ``count`` is no number of samples.
        """
        require_number("Profile.suspects(...) was called.", "count", count, "number of samples")
        norms = self.tensors[f"sample_gradient_norm/{self.total.name}"]
        return [int(place) for place in norms.argsort(descending=True, stable=True)[:count]]

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the tensors, as plain numbers, strings, lists and dictionaries."""
        plain = dataclasses.asdict(dataclasses.replace(self, tensors={}))
        del plain["tensors"]
        return {"format": FORMAT, **plain}
