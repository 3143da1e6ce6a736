"""A profile as a value: it prints, saves and loads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from packprop.applications.reports.page.libraries import can_fill_templates
from packprop.applications.reports.page.render import fragment_of, page_of
from packprop.applications.reports.profile.costs import MemoryUse
from packprop.applications.reports.profile.files import (
    check_folder,
    read_files,
    replace_profile,
)
from packprop.applications.reports.profile.layers import Layer
from packprop.applications.reports.profile.outlying import OutlyingSample
from packprop.applications.reports.profile.table import footer, profile_table
from packprop.applications.reports.profile.values import ProfileValues
from packprop.store.schema import fitted


@dataclass(frozen=True)
class Profile(ProfileValues):
    """The result of ``profile``: prints as a table, shows itself in a notebook, draws a page, saves and loads.

    Its values are those of ``ProfileValues``; NOTE [Profile quantities] explains them.
    """

    def save(self, folder: str | Path) -> tuple[Path, Path]:
        """Write ``profile.json`` and ``profile.safetensors``, over older ones; return their paths.

        Raises:
            BadInput: If files cannot be written to the folder.
        """
        check_folder(folder)
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        return replace_profile(target, self.to_json(), self.tensors)

    @classmethod
    def load(cls, folder: str | Path) -> Profile:
        """Read a profile that ``save`` wrote.

        Raises:
            BadInput: If there is no profile, or its format is not that of this version of packprop.
        """
        saved, tensors = read_files(folder)
        kinds = {"layers": list[Layer], "total": Layer, "memory": MemoryUse | None}
        saved |= {name: fitted(kind, saved[name], name) for name, kind in kinds.items()}
        norms = f"sample_gradient_norm/{saved['total'].name}"
        if saved["total"].gradient_norm is None and norms in tensors:  # it was not finite
            saved["total"] = replace(saved["total"], gradient_norm=math.nan)
        saved["outlying"] = [OutlyingSample(**_with_number(each, "norm")) for each in saved["outlying"]]
        return cls(**_with_number(saved, "loss"), tensors=tensors)

    def to_html(self) -> str:
        """Return the page: one HTML file with figures, which needs no network.

        Raises:
            PackpropError: If the libraries that draw it are not installed.
        """
        return page_of(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Return the form for a notebook; without the template engine, the table in plain text."""
        plain = {"text/plain": str(self)}
        return {**plain, "text/html": fragment_of(self)} if can_fill_templates() else plain

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.headline is not None:
            yield Text(self.headline, "bold red")
            yield Text()
        yield profile_table(self.layers, self.total, options.max_width)
        yield Text()
        yield from footer(self.settings, self.loss, self.samples, self.batches)


def _with_number(saved: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the entries, with NaN under ``name`` if it was ``None``, which stands for no finite number."""
    return saved if saved[name] is not None else {**saved, name: math.nan}
