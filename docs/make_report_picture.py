"""Draw docs/images/report.png: the top of the page of the built-in example, in headless Chromium.

Needs ``pip install 'packprop[examples,report]' playwright`` and a Chromium of the system; then
``python docs/make_report_picture.py``.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from PIL import Image
from playwright.sync_api import sync_playwright

import packprop
from packprop.examples import digits

WIDTH, HEIGHT = 1160, 1160


def draw(page: Path, picture: Path) -> None:
    """A picture of the top of a page."""
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        view.goto(page.as_uri())
        view.wait_for_function("document.querySelectorAll('.chart svg').length == 6")
        view.screenshot(path=picture)
        browser.close()
    Image.open(picture).convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(picture, optimize=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = packprop.profile(*digits(), timeline=True)
    with tempfile.TemporaryDirectory() as folder:
        page = found.save_page(Path(folder) / "profile.html")
        draw(page, Path(__file__).parent / "images" / "report.png")
