"""Tables and other things that rich draws, as plain text."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def plain_text(drawn: RenderableType, width: int, *, markup: bool = True) -> str:
    """Return what a terminal of this width, in characters, would show without colours, without trailing blanks.

    Args:
        drawn: A table, a text, or anything else that rich draws.
        width: Characters in a line.
        markup: Reads square brackets as styles, ``[bold]``, and not as text.
    """
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, markup=markup).print(drawn)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
