"""Memory of trials: packprop need not try again as long as everything is equal that decides on the outcome."""

from __future__ import annotations

from typing import Any

MANY = 1024
"""The largest number of cases to remember."""


class Verdicts(dict[Any, bool]):
    """Says of cases whether something was right in them; forgets all when there are too many."""

    def note(self, case: Any, is_right: bool = True) -> None:
        """Remember a verdict."""
        if len(self) >= MANY:
            self.clear()
        self[case] = is_right
