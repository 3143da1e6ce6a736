"""What extensions with Monte Carlo draws share: their arguments, and the seed that these make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from packprop.errors import BadInput
from packprop.types import Extension, Seed


def require_draws(name: str, mc_samples: object) -> None:
    """Refuse what is no number of draws.

    Raises:
        BadInput: A ``ValueError``.
    """
    if type(mc_samples) is not int or mc_samples < 1:
        raise BadInput(
            f"{name}(mc_samples={mc_samples!r}) was asked for.",
            "mc_samples",
            "it is the number of Monte Carlo draws",
            "give a whole number of at least 1",
        )


@dataclass(frozen=True, eq=False)
class Sampled(Extension):
    """An extension whose columns are gradients for targets drawn from the model.

    Args:
        mc_samples: Draws for each sample of the batch.
        subsampling: Indices of samples, at the scale of the full batch.
        generator: Makes the draws repeatable; the global random state is left alone then.
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
        """Columns that extensions with equal draws and generator share."""
        return Seed("ggn", self.mc_samples, self.generator)
