"""Sphinx extension: what lies outside of the site, and the way into it.

Pages link to source files and folders of the repository. On the host of the repository these are pages of their
own; on the site a file is one to download, and a folder is named without a link. ``index.html`` leads to the
front page, which is ``docs/index.html`` because pages have the paths that they have in the repository.
The search works on files as it does on a server (``static/search.js``).
"""

from __future__ import annotations

import json
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

FRONT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>packprop</title>
<meta http-equiv="refresh" content="0; url=docs/index.html">
<a href="docs/index.html">packprop</a>
</html>
"""


class Folders(SphinxTransform):
    """A link to a folder becomes its text: there is nothing to open."""

    default_priority = 5

    def apply(self, **_: object) -> None:
        """Change the links of one page."""
        here = Path(self.env.doc2path(self.env.docname)).parent
        for link in [*self.document.findall(addnodes.pending_xref)]:
            target = str(link.get("reftarget", ""))
            if link.get("refdomain") in (None, "doc", "std", "") and (here / target).is_dir():
                link.replace_self(nodes.inline("", "", *link.children))


def write_front(app: Sphinx, failure: Exception | None) -> None:
    """Write the page that leads to the front page."""
    if failure is None and app.builder.format == "html":
        (Path(app.outdir) / "index.html").write_text(FRONT, encoding="utf-8")


def write_texts(app: Sphinx, failure: Exception | None) -> None:
    """Write the text of every page into a script, for the search where pages are read from files."""
    if failure is None and app.builder.format == "html":
        texts = {
            name: " ".join(app.env.get_doctree(name).astext().split()) for name in sorted(app.env.found_docs)
        }
        script = f"window.searchTexts = {json.dumps(texts, ensure_ascii=False)};\n"
        (Path(app.outdir) / "searchtexts.js").write_text(script, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register all."""
    app.add_transform(Folders)
    app.connect("build-finished", write_front)
    app.connect("build-finished", write_texts)
    app.add_js_file("search.js")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
