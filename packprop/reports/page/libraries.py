"""The libraries that pages are made with: whether they are here, and what to do where they are not."""

from __future__ import annotations

import importlib.util

from packprop.errors import PackpropError, install

ENGINE = ("jinja2",)
"""What fills templates."""

LIBRARIES = (*ENGINE, "altair", "vl_convert", "PIL")
"""What a page is made with: templates, figures, the script that draws them, pictures."""

INSTALL = install("report")


def can_fill_templates() -> bool:
    """Whether the template engine is here."""
    return not missing(ENGINE)


def missing(libraries: tuple[str, ...] = LIBRARIES) -> list[str]:
    """Those of the libraries that are not here."""
    return [name for name in libraries if importlib.util.find_spec(name) is None]


def require_libraries(libraries: tuple[str, ...] = LIBRARIES) -> None:
    """Refuse to make a page without what it is made with.

    Raises:
        PackpropError: With the libraries that are not here.
    """
    if lacking := missing(libraries):
        raise PackpropError(
            "An HTML page was asked for.",
            "packprop.reports.page",
            f"{', '.join(lacking)} cannot be imported",
            INSTALL,
        )
