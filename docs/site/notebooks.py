"""Sphinx extension: each page of the gallery as a notebook, beside the script that it is.

A page is a program in cells (``# %%``) with text between them (``# %% [markdown]``, and its docstring).
Notebooks are made when the site is built, and are kept nowhere else: no page is there twice.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

GALLERY = Path(__file__).resolve().parents[1] / "gallery"
ORIGIN = "*Made by `make gallery` from [{0}.py]({0}.py): run it, change it.*"
"""What a page says of where it comes from."""
OFFERED = (
    '<p class="offered">This page as <a href="{0}.py" download>a script</a> or '
    '<a href="{0}.ipynb" download>a notebook</a>; both need <code>{1}</code>.</p>'
)
NEEDS = {
    "private_training": "pip install '.[examples,report]' opacus",
    "laplace_approximation": "pip install '.[laplace]'",
}
"""What a page needs beyond the others."""


def cells(source: str) -> list[tuple[str, int, str]]:
    r"""The parts of a page in order: ``"markdown"`` or ``"code"``, number of the first line, text.

    >>> cells('\"\"\"# Title\"\"\"\n\n# %%\nx = 1\n\n# %% [markdown]\n# Read this.\n')
    [('markdown', 1, '# Title'), ('code', 4, 'x = 1'), ('markdown', 7, 'Read this.')]
    """
    found = []
    opening, *rest = re.split(r"^# %%", source, flags=re.MULTILINE)
    found.append(("markdown", 1, opening.strip().removeprefix('"""').removesuffix('"""').strip()))
    line = 1 + opening.count("\n")
    for part in rest:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            found.append(("markdown", line + 1, re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip()))
        else:
            found.append(("code", line + 1, body.strip("\n")))
        line += part.count("\n")
    return found


def notebook(source: str) -> dict[str, Any]:
    """Return a page as a notebook (nbformat 4.4), without outputs; cells that draw are folded."""
    made = []
    for kind, _, text in cells(source):
        cell: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
            if "plt.show()" in text:
                cell["metadata"] = {"jupyter": {"source_hidden": True}}
        made.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": made,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 4,
    }


def _offer(app: Any, name: str, source: list[str]) -> None:
    """On the page of a program, offer it as a script and a notebook."""
    page = Path(name)
    if page.parent.name == "gallery" and (GALLERY / f"{page.name}.py").exists():
        needed = NEEDS.get(page.name, "pip install '.[examples,report]'")
        source[0] = source[0].replace(ORIGIN.format(page.name), OFFERED.format(page.name, needed))


def _write(app: Any, failure: Exception | None) -> None:
    """Write scripts and notebooks beside the pages."""
    if failure is None and app.builder.format == "html":
        folder = Path(app.outdir) / "docs/gallery"
        for script in sorted(GALLERY.glob("*.py")):
            text = script.read_text(encoding="utf-8")
            (folder / script.name).write_text(text, encoding="utf-8")
            made = json.dumps(notebook(text), indent=1, ensure_ascii=False) + "\n"
            (folder / f"{script.stem}.ipynb").write_text(made, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Register both."""
    app.connect("source-read", _offer)
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
