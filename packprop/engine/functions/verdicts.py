"""Memory of trials: packprop tries again only if something that decides on the outcome has changed."""

from __future__ import annotations

from typing import Any

MANY = 1024
"""The largest number of cases that packprop remembers."""


class Verdicts(dict[Any, bool]):
    """A table that tells whether something was right in a case; it forgets all cases when it is full."""

    def note(self, case: Any, is_right: bool = True) -> None:
        """Remember a verdict."""
        if len(self) >= MANY:
            self.clear()
        self[case] = is_right
