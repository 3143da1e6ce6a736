"""Extensions with a row for each sample, or for each token of each sample.

With ``per="token"``, packprop splits the loss into its terms: one for each sample n and each position t that
the loss has beside its axes of samples and classes. A row is the gradient of one term through the whole model,
attention to earlier tokens included; the rows of a sample sum to its own. If zero multiplies the term of a
token (``ignore_index``, padding that a weight removes), its row is zero. See NOTE [Tokens]
(``engine/curvature/tokens.py``). There are as many columns as a sample has tokens; packprop sweeps them in
chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from packprop.engine.algebra.monoid import CAT
from packprop.extensions.arguments import require_one_of
from packprop.types import Extension, Row

Per = Literal["sample", "token"]
"""The units that can have rows of their own."""

UNITS = get_args(Per)


class ByUnit(Extension):
    """An extension with rows for samples, or for tokens; quantities of tokens have an attribute of their own.

    Its name is that of the attribute for samples, with the suffix ``_token``.
    """

    per: Per

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        super().__post_init__()
        require_one_of(f"{self.name}(per={self.per!r}) was asked for.", "per", self.per, UNITS)
        if self.per == "token":
            object.__setattr__(self, "savefield", f"{type(self).savefield}_token")

    def finish(self, values: list[Any], samples: int) -> Any:
        """Move samples before tokens."""
        if self.per == "token" and self.rows[0].over_n is CAT[1]:
            return values[0].movedim(1, 0)
        return values[0]


@dataclass(frozen=True, eq=False)
class BySampleOrToken(ByUnit):
    """An extension of one statistic of samples, or one of tokens.

    Args:
        subsampling: Indices of samples.
        per: The unit that has rows of its own.
    """

    subsampling: Sequence[int] | None = None
    per: Per = "sample"
    of_samples: ClassVar[Row]
    of_tokens: ClassVar[Row]

    @property
    def rows(self) -> tuple[Row, ...]:
        """The statistic of samples, or that of tokens."""
        return (self.of_tokens if self.per == "token" else self.of_samples,)
