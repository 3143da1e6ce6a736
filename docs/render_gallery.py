"""Run the pages of the gallery, and write down what they say, print and draw: ``make gallery``.

A page is a program in cells (``# %%``) with text between them (``# %% [markdown]``, and its docstring), which
editors and notebooks open as it is. Beside it stands what came out: ``docs/gallery/<page>.md``. The figures of
a cell are kept as ``images/<page>.png`` and so on, with their titles as what is read out instead of them; the
code of such a cell is folded away. ``docs/gallery/README.md`` lists all pages with the first figure of each.

Needs matplotlib and scikit-learn: ``pip install '.[examples,report]'``; two pages need a library more,
``pip install '.[gallery]'``. Where that cannot be imported, they stay as they are.
"""

from __future__ import annotations
import __future__

import contextlib
import importlib
import io
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "site"))
from notebooks import ORIGIN, cells

GALLERY = Path(__file__).resolve().parent / "gallery"
# The order in which they are read.
PAGES = (
    "hessian_trace",
    "convolutions",
    "auto_encoder",
    "variance_gradient",
    "eager_penalties",
    "compiled_steps",
    "influence",
    "planted_sources",
    "fisher_diagonal",
    "private_training",
    "mislabelled",
    "laplace_approximation",
    "noise_scale",
)
# What some pages need beyond the extras of the tests.
NEEDS = {"private_training": "opacus", "laplace_approximation": "laplace"}
INDEX = """# Gallery

You can read these programs from top to bottom, and copy from them. Each does a job by hand first, then the
BackPACK way, if BackPACK has one, and then with packprop alone. Each checks its own claims whenever the tests
run. The output and the figures come from the handwritten digits that ship with scikit-learn. If you have
MNIST, the programs use it when you run them.
"""


@contextlib.contextmanager
def only_shipped_data() -> Iterator[None]:
    """Inside, MNIST is missing: pages show the digits of scikit-learn, whatever else is installed."""
    name = "torchvision.datasets"
    known, folder = sys.modules.get(name), os.environ.pop("PACKPROP_MNIST", None)
    sys.modules[name] = None  # type: ignore[assignment]  # importing it fails
    try:
        yield
    finally:
        del sys.modules[name]
        if known is not None:
            sys.modules[name] = known
        if folder is not None:
            os.environ["PACKPROP_MNIST"] = folder


def render(page: Path, images: Path) -> str:
    """Run a page; return it with what came out, and write its figures into ``images``."""
    import matplotlib.pyplot as plt

    matplotlib.use("agg")
    names: dict[str, Any] = {"__name__": "__main__"}  # no file: a notebook has none
    flags = __future__.annotations.compiler_flag
    text, drawn = [], 0
    plt.close("all")
    with torch.random.fork_rng(), plt.rc_context(), only_shipped_data():
        for kind, line, body in cells(page.read_text(encoding="utf-8")):
            if kind == "markdown":
                text.append(body)
                continue
            printed = io.StringIO()
            # empty lines in front: a traceback shows the line of the file
            code = compile("\n" * (line - 1) + body, str(page), "exec", flags, dont_inherit=True)
            with contextlib.redirect_stdout(printed), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")
                exec(code, names)
            shown = f"```python\n{body.strip()}\n```"
            figures = [plt.figure(number) for number in plt.get_fignums()]
            text.append(
                f"<details><summary>The figure</summary>\n\n{shown}\n\n</details>" if figures else shown
            )
            if printed.getvalue():
                lines = (line.rstrip() for line in printed.getvalue().strip("\n").splitlines())
                text.append("```text\n{}\n```".format("\n".join(lines)))
            for figure in figures:
                drawn += 1
                name = page.stem if drawn == 1 else f"{page.stem}_{drawn}"
                figure.savefig(images / f"{name}.png")
                titles = [figure.get_suptitle(), *(axes.get_title(loc="left") for axes in figure.axes)]
                text.append("![{}](images/{}.png)".format("; ".join(filter(None, titles)), name))
            plt.close("all")
    return "\n\n".join([text[0], ORIGIN.format(page.stem), *text[1:]]) + "\n"


def index(pages: dict[str, str]) -> str:
    """The list of pages: title, first paragraph and first figure of each, by the name of the page."""
    text = [INDEX.strip()]
    for name, rendered in pages.items():
        title, first, *_ = rendered.split("\n\n")
        picture = next(iter(re.findall(rf"^!\[(.*)\]\(images/{name}\.png\)$", rendered, re.MULTILINE)))
        text += [f"## [{title.removeprefix('# ')}]({name}.md)", first, f"![{picture}](images/{name}.png)"]
    return "\n\n".join(text) + "\n"


def lacking(page: str) -> str:
    """What a page needs and cannot be imported; empty if there is nothing.

    A library may not go with the release of another one that it imports, and say so in its own way.
    """
    try:
        importlib.import_module(NEEDS.get(page, "torch"))
    except (ImportError, RuntimeError) as error:
        instead = "pip install '.[gallery]', with a torchvision that belongs to this build of torch, or none"
        return f"{NEEDS[page]} cannot be imported, {error}; {instead}"
    return ""


def main(chosen: list[str]) -> None:
    """Render the pages of these names, or all, and the index."""
    torch.set_num_threads(1)
    for name in chosen or PAGES:
        lacks = lacking(name)
        print(f"{name}: left as it is, {lacks}" if lacks else name)
        if lacks:
            continue
        rendered = render(GALLERY / f"{name}.py", GALLERY / "images")
        (GALLERY / f"{name}.md").write_text(rendered, encoding="utf-8")
    written = {name: GALLERY / f"{name}.md" for name in PAGES}
    there = {name: path.read_text(encoding="utf-8") for name, path in written.items() if path.exists()}
    (GALLERY / "README.md").write_text(index(there), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
