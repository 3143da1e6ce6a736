"""The common part of the results of ``profile`` and ``compare``: they print as a table, and draw a page."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult

from packprop.applications.reports.profile.files import json_ready, write_page
from packprop.applications.reports.profile.table import WIDTH
from packprop.engine.tensors import plain_text


class Shown(ABC):
    """A result that prints as ``rich`` does, and has a page."""

    @abstractmethod
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, piece by piece."""

    @abstractmethod
    def to_html(self) -> str:
        """Return the page: one HTML file with figures, which needs no network.

        Raises:
            PackpropError: If the libraries that draw it are not installed.
        """

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return everything but tensors, as plain numbers, strings, lists and dictionaries."""

    def to_json(self) -> str:
        """Return ``to_dict`` as text; ``null`` stands for values that are missing, infinite or NaN."""
        return json.dumps(json_ready(self.to_dict()), indent=2, allow_nan=False) + "\n"

    def save_page(self, path: str | Path) -> Path:
        """Write the page to a file, over an older one; return its path.

        Raises:
            BadInput: If the file cannot be written.
            PackpropError: If the libraries that draw the page are not installed.
        """
        return write_page(path, self.to_html())

    def __str__(self) -> str:
        return plain_text(self, width=WIDTH)
