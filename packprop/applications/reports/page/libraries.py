"""The libraries behind pages: checks for them, and advice if they are missing."""

from __future__ import annotations

import importlib.util

from packprop.errors import PackpropError, install

ENGINE = ("jinja2",)
"""The library that fills templates."""

LIBRARIES = (*ENGINE, "altair", "vl_convert", "PIL")
"""The libraries of a page: templates, figures, the script that draws them, pictures."""

INSTALL = install("report")


def can_fill_templates() -> bool:
    """Tell whether the template engine is installed."""
    return not missing(ENGINE)


def missing(libraries: tuple[str, ...] = LIBRARIES) -> list[str]:
    """Return the missing libraries."""
    return [name for name in libraries if importlib.util.find_spec(name) is None]


def require_libraries(libraries: tuple[str, ...] = LIBRARIES) -> None:
    """Refuse to make a page without its libraries.

    Raises:
        PackpropError: If libraries are missing; the error names them.
    """
    if lacking := missing(libraries):
        raise PackpropError(
            "An HTML page was asked for.",
            "packprop.applications.reports.page",
            f"{', '.join(lacking)} cannot be imported",
            INSTALL,
        )
