"""A profile in a notebook: findings and the table of layers, without figures and scripts."""

from __future__ import annotations

from packprop.applications.reports.page.libraries import ENGINE, require_libraries
from packprop.applications.reports.page.render import COLUMNS, shared_parts, table_of
from packprop.applications.reports.page.templating import template
from packprop.applications.reports.profile.values import ProfileValues


def fragment_of(values: ProfileValues) -> str:
    """Return a piece of HTML that a notebook shows.

    Raises:
        PackpropError: If the template engine is not installed.
    """
    require_libraries(ENGINE)
    return template("fragment.html").render(**shared_parts(values), columns=COLUMNS, **table_of(values))
