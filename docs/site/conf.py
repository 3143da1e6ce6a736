"""How the site is built: ``make docs``.

The source is the whole repository, and of it the Markdown pages that are read on the web as they are: no page
is there twice, and a link between two pages is the same in both places. ``docs/index.md`` is the front page.
"""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

project = "packprop"
author = "packprop contributors"
project_copyright = author
release = version_of("packprop")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "completeness",
    "notebooks",
    "outside",
    "properties",
]
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "docs/**.md"]
exclude_patterns = [".*", "build", "dist", "packprop", "tests", "profile", "**/__pycache__"]

# Pages
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
myst_dmath_double_inline = True
suppress_warnings = [
    "myst.header",  # pages of the gallery start cells with headings of any level
]

# Reference
autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
default_role = "code"
maximum_signature_line_length = 88
add_module_names = False
python_use_unqualified_type_names = True

# Every name that the reference refers to is there, or it is an error. Those of other libraries are not here:
# nothing is fetched for them.
nitpicky = True
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(torch|numpy|np|pandas|scipy|rich|collections|contextlib|typing|pathlib|types)\..*",
    ),
    ("py:.*", r"(Any|Callable|Iterable|Iterator|Literal|Mapping|Path|Self|Sequence|Tensor|Unpack|nn\..*)"),
    # classes of inner parts and aliases of types, which signatures name
    ("py:class", r"packprop\.(context\.|\w+\.\w+\.).*"),
    ("py:class", r"Difference|P|Per|Otherwise|Approximation|Columns|EntryOrder|Fisher|Precision"),
]

# Looks
html_theme = "furo"
html_title = f"packprop {release}"
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0072B2", "color-brand-content": "#0072B2"},
    "dark_css_variables": {"color-brand-primary": "#56B4E9", "color-brand-content": "#56B4E9"},
}
html_static_path = ["static"]
html_css_files = ["site.css"]
copybutton_exclude = ".linenos, .gp, .go"
