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
from typing import ClassVar, Literal, get_args

from packprop.extensions.arguments import require_one_of
from packprop.types import Extension, Row

Per = Literal["sample", "token"]
"""The units that have rows of their own."""


def save_by_token(extension: Extension, per: Per) -> None:
    """Check ``per``, and give quantities of tokens their own attribute: that of samples and ``_token``.

    Raises:
        BadInput: If ``per`` is neither.
    """
    require_one_of(f"{extension.name}(per={per!r}) was asked for.", "per", per, get_args(Per))
    if per == "token":
        object.__setattr__(extension, "savefield", f"{type(extension).savefield}_token")


@dataclass(frozen=True, eq=False)
class BySampleOrToken(Extension):
    """An extension of one statistic of samples, or one of tokens.

    Args:
        subsampling: Indices of samples.
        per: The unit that has rows of its own.
    """

    subsampling: Sequence[int] | None = None
    per: Per = "sample"
    of_samples: ClassVar[Row]
    of_tokens: ClassVar[Row]

    def __post_init__(self) -> None:
        """Refuse bad arguments at once."""
        super().__post_init__()
        save_by_token(self, self.per)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The statistic of samples, or that of tokens."""
        return (self.of_tokens if self.per == "token" else self.of_samples,)
