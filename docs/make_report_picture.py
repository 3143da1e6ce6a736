"""Draw docs/images/report*.png from the pages that the command makes of two examples, in headless Chromium.

The top and the costs of the page of the digits, and the samples on the page of the small language model.

Needs ``pip install '.[examples,report]' playwright`` and a Chromium of the system; then
``python docs/make_report_picture.py``.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

import torch
from PIL import Image
from playwright.sync_api import sync_playwright

from packprop.applications.reports import cli

IMAGES = Path(__file__).resolve().parent / "images"
WIDTH, HEIGHT, MARGIN = 1160, 1160, 20


def draw(page: Path, picture: Path, element: str | None = None) -> None:
    """A picture of the top of a page, or of one element on it."""
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        view.goto(page.as_uri())
        view.wait_for_function(
            "document.querySelectorAll('.chart svg').length == document.querySelectorAll('.chart').length"
        )
        if element is None:
            view.screenshot(path=picture)
        else:
            box = view.locator(element).bounding_box()
            assert box is not None
            around = box.copy()
            around["x"] -= MARGIN
            around["width"] += 2 * MARGIN
            around["height"] += MARGIN
            view.screenshot(path=picture, clip=around, full_page=True)
        browser.close()
    Image.open(picture).convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(picture, optimize=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    example = "packprop.examples:language_model --decode packprop.examples:decode --output runs/text"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        cli.main(["profile", "--output", "profile"])
        cli.main(["profile", *example.split()])
        digits, text = (Path(run).resolve() / "profile.html" for run in ("profile", "runs/text"))
        draw(digits, IMAGES / "report.png")
        draw(digits, IMAGES / "report_costs.png", "section[aria-labelledby=title-costs]")
        draw(text, IMAGES / "report_text.png", ".samples")
