"""The command, run in a folder with a file of factories."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from packprop.applications.reports import cli
from tests.reports.factories import FACTORIES, Run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command in a folder of its own, with modules to import: status, output, errors."""
    (tmp_path / "factories.py").write_text(FACTORIES)
    (tmp_path / "needs.py").write_text("import surely_not_installed\n")
    (tmp_path / "wrong.py").write_text("x = (\n")
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit('no')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("factories", "needs", "wrong", "leaving"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        # the page takes seconds, and has tests of its own
        page = () if "--page" in arguments else ("--no-page",)
        status = cli.main(["profile", *page, *(each for each in arguments if each != "--page")])
        return status, *capfd.readouterr()

    return call
