"""Tables and other things that rich draws, as plain text."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType


def plain_text(*drawn: RenderableType, width: int, markup: bool = True) -> str:
    """Return what a terminal of this width would show without colours, without trailing blanks.

    Args:
        drawn: Tables, texts, or anything else that rich draws, one below the other.
        width: Characters in a line.
        markup: Reads square brackets as styles, ``[bold]``, and not as text.
    """
    from rich.console import Console  # here, because a backward pass draws nothing, and the import takes time

    out = io.StringIO()
    Console(file=out, width=width, color_system=None, markup=markup).print(*drawn)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
