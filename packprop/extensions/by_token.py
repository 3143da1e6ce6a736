"""What extensions share that have a row for each sample, or one for each token of each sample.

With ``per="token"`` the loss is taken apart into its terms: one for each sample n and each position t that the
loss has beside its axes of samples and classes. A row is the gradient of one term through the whole model,
attention to earlier tokens included; the rows of a sample sum to its own. Tokens whose term is multiplied by
zero (``ignore_index``, padding that a weight removes) have rows of zeros. See NOTE [Tokens]
(``packprop/curvature/tokens.py``). There are as many columns as a sample has tokens, which are swept in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from packprop.extensions.arguments import require_one_of
from packprop.types import Extension, Row

Per = Literal["sample", "token"]
"""What has rows of its own."""


def save_by_token(extension: Extension, per: Per) -> None:
    """Check ``per``, and give quantities of tokens an attribute of their own: that of samples and ``_token``.

    Raises:
        BadInput: If ``per`` is neither.
    """
    require_one_of(f"{extension.name}(per={per!r}) was asked for.", "per", per, get_args(Per))
    if per == "token":
        object.__setattr__(extension, "savefield", f"{type(extension).savefield}_token")


@dataclass(frozen=True, eq=False)
class BySampleOrToken(Extension):
    """An extension of one statistic of samples, and one of tokens.

    Args:
        subsampling: Indices of samples.
        per: What has rows of its own.
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
