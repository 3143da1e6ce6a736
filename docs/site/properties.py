"""Sphinx extension: what is shown of members of classes.

The docstring of a property is a sentence, also where it has a colon.

Napoleon takes what stands before a colon in the first line for the type of an attribute. An empty comment of
reStructuredText takes the place of that line, and is not shown.

The page of extensions says what can be asked for. What an extension is made of (rows, how they are finished) is
the same for all of them, and is said once, where extensions of one's own are.
"""

from __future__ import annotations

from sphinx.application import Sphinx

from packprop.types import Extension


def keep_sentence(app: Sphinx, what: str, name: str, held: object, options: object, lines: list[str]) -> None:
    """Put an empty comment first."""
    if what in ("attribute", "data", "property") and lines:
        lines[:0] = ["..", ""]


def skip_parts(app: Sphinx, what: str, name: str, held: object, skip: bool, options: object) -> bool | None:
    """Skip what every extension has, on the page that lists them."""
    return True if app.env.docname == "docs/reference/extensions" and hasattr(Extension, name) else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Register both; the first before napoleon's, which has the usual priority of 500."""
    app.connect("autodoc-process-docstring", keep_sentence, priority=100)
    app.connect("autodoc-skip-member", skip_parts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
