"""Tables and other things that rich draws, as plain text."""

from __future__ import annotations

import io
import random
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType


def import_rich() -> None:
    """Import rich where it is first needed: the import takes time, and most passes draw nothing.

    The import uses a random number of Python's generator; this function restores the generator's state.
    """
    if "rich.progress" not in sys.modules:
        state = random.getstate()
        import_module("rich.progress")

        random.setstate(state)


def plain_text(*drawn: RenderableType, width: int, markup: bool = True) -> str:
    """Return the text that a terminal of this width would show, without colours and trailing blanks.

    Args:
        drawn: Tables, texts, or anything else that rich draws, one below the other.
        width: Characters in a line.
        markup: Reads square brackets as styles, ``[bold]``, and not as text.
    """
    import_rich()
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width, color_system=None, markup=markup).print(*drawn)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
