"""Extensions with Monte Carlo draws: their arguments, and the seed that follows from these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from packprop.extensions.arguments import require_draws
from packprop.types import Extension, Seed


@dataclass(frozen=True, eq=False)
class Sampled(Extension):
    """An extension whose columns are gradients for targets drawn from the model.

    Args:
        mc_samples: Draws for each sample of the batch.
        subsampling: Indices of samples, at the scale of the full batch.
        generator: Makes the draws repeatable, and leaves the global random state alone.
    """

    mc_samples: int = 1
    subsampling: Sequence[int] | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        super().__post_init__()
        require_draws(self.name, self.mc_samples)

    @property
    def seed(self) -> Seed:
        """The seed, which extensions with equal draws and generator share."""
        return Seed("ggn", self.mc_samples, self.generator)
