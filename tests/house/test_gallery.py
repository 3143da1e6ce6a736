"""Every page of the gallery runs, keeps its own promises, and is written down as it comes out."""

from __future__ import annotations

import doctest
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.selection import thorough

DOCS = Path(__file__).resolve().parents[2] / "docs"
GALLERY = DOCS / "gallery"
PAGES = sorted(path.stem for path in GALLERY.glob("*.py"))
# A figure may turn out otherwise on another machine, its unit and its sign, too; a word may not.
NUMBER = re.compile(r"(?<![\w/])-?\d[\d.,]*(e[-+]?\d+)?(?![\w/])( ([KMG]i)?B\b)?")


@pytest.fixture(scope="module")
def renderer() -> ModuleType:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("render_gallery", DOCS / "render_gallery.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def comparable(page: str) -> list[str]:
    """Its paragraphs; what was printed is compared word by word, with a sign for each number."""
    parts = []
    for part in re.split(r"^(```text\n.*?^```)$", page, flags=re.MULTILINE | re.DOTALL):
        printed = part.startswith("```text\n")
        parts.append(" ".join(NUMBER.sub("#", part).split()) if printed else part)
    return parts


@thorough
@pytest.mark.filterwarnings("ignore:MNIST was not found", "ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("name", PAGES)
def test_a_page(renderer: ModuleType, name: str, tmp_path: Path) -> None:
    if lacks := renderer.lacking(name):
        pytest.skip(lacks)
    rendered = renderer.render(GALLERY / f"{name}.py", tmp_path)
    written = (GALLERY / f"{name}.md").read_text(encoding="utf-8")
    assert comparable(rendered) == comparable(written), "make gallery writes it anew"
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted(path.name for path in (GALLERY / "images").glob(f"{name}*.png"))
    assert all(path.stat().st_size > 10_000 for path in tmp_path.iterdir())


def test_the_index_lists_every_page(renderer: ModuleType) -> None:
    assert sorted(renderer.PAGES) == PAGES
    pages = {name: (GALLERY / f"{name}.md").read_text(encoding="utf-8") for name in renderer.PAGES}
    assert renderer.index(pages) == (GALLERY / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def notebooks(renderer: ModuleType) -> ModuleType:
    return sys.modules["notebooks"]  # which the renderer has imported


def test_cells_are_told_apart(notebooks: ModuleType) -> None:
    assert doctest.testmod(notebooks) == (0, 1)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_as_a_notebook(notebooks: ModuleType, name: str) -> None:
    """Its code is the script's, which needs no file of its own; figures are set up where they are drawn."""
    source = (GALLERY / f"{name}.py").read_text(encoding="utf-8")
    made = notebooks.notebook(source)
    code = ["".join(cell["source"]) for cell in made["cells"] if cell["cell_type"] == "code"]
    assert code == [text for kind, _, text in notebooks.cells(source) if kind == "code"]
    assert made["cells"][0] == {"cell_type": "markdown", "metadata": {}, "source": made["cells"][0]["source"]}
    assert "__file__" not in source
    drawing = [cell for cell in made["cells"] if "matplotlib" in "".join(cell["source"])]
    assert drawing
    assert all(cell["metadata"] == {"jupyter": {"source_hidden": True}} for cell in drawing)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_narrow(name: str) -> None:
    """Code of at most 88 characters a line, on the page and in the script."""
    source = (GALLERY / f"{name}.py").read_text(encoding="utf-8")
    assert max(map(len, source.splitlines())) <= 88
    page = (GALLERY / f"{name}.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert max(len(line) for block in shown for line in block.splitlines()) <= 88


def test_what_is_compared() -> None:
    shown = "Peak 3.\n\n```text\npeak 3.5 MiB, off by 6e-10 in 2 passes\n```\n"
    assert comparable(shown) == comparable(shown.replace("3.5 MiB", "812 KiB").replace("6e-10", "0e+00"))
    assert comparable(shown) != comparable(shown.replace("Peak 3", "Peak 4"))
    assert comparable(shown) != comparable(shown.replace("passes", "steps"))


def test_an_error_names_the_line_of_the_page(renderer: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    page.write_text('"""# Page"""\n\n# %% [markdown]\n# Text.\n\n# %%\nx = 1\nassert x == 2\n')
    with pytest.raises(AssertionError) as caught:
        renderer.render(page, tmp_path)
    assert caught.traceback[-1].lineno + 1 == 8


def test_a_page_whose_library_is_not_there_is_left_as_it_is(
    renderer: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opacus", None)
    before = {path: path.read_bytes() for path in GALLERY.glob("*.md")}
    threads = torch.get_num_threads()
    renderer.main(["private_training"])
    torch.set_num_threads(threads)
    assert before == {path: path.read_bytes() for path in GALLERY.glob("*.md")}
    said = capsys.readouterr().out
    assert said.startswith("private_training: left as it is, opacus cannot be imported")
    assert "pip install '.[gallery]'" in said
