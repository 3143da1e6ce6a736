"""The templates of pages, from the folder ``templates``."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from packprop.applications.reports.profile.table import number_text, seconds_text
from packprop.engine.memory import byte_text

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup


@functools.cache
def template(name: str) -> Template:
    """Return the template in a file. It escapes all values but those that it marks as safe."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("packprop.applications.reports.page", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = breakable
    known = (byte_text, drawing_script, number_text, seconds_text)
    environment.globals |= {function.__name__: function for function in known}
    return environment.get_template(name)


@functools.cache
def drawing_script() -> str:
    """Return the library that draws figures in a browser, as one script: about 0.9 MB."""
    import altair
    import vl_convert

    version = ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    known = [text.removeprefix("v") for text in vl_convert.get_vegalite_versions()]
    bundle: Any = vl_convert.javascript_bundle  # its types require a snippet; without one it returns everything
    script: str = bundle(vl_version=version if version in known else None)
    return script.replace("</script", "<\\/script")


def breakable(text: str) -> Markup:
    """Return text in which a line may break after the dots of a name.

    >>> breakable("encoder.0.proj <of 0.5>")
    Markup('encoder.0.<wbr>proj &lt;of 0.5&gt;')
    """
    from markupsafe import Markup

    return Markup("<wbr>").join(re.split(r"(?<=\w\.)(?=[A-Za-z_])", text))
