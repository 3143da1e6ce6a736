"""Draw docs/images/report*.png from the pages of two examples, in headless Chromium.

The top and the costs of the page of the digits, and the samples on the page of the small language model.

Needs ``pip install '.[examples,report]' playwright`` and a Chromium of the system; then
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
from packprop import Profile
from packprop.examples import decode, digits, language_model

IMAGES = Path(__file__).parent / "images"
WIDTH, HEIGHT = 1160, 1160


def draw(profile: Profile, figures: int, picture: Path, element: str | None = None) -> None:
    """A picture of the top of a profile's page, or of one element on it."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        page = profile.save_page(Path(folder) / "profile.html")
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        view.goto(page.as_uri())
        view.wait_for_function(f"document.querySelectorAll('.chart svg').length == {figures}")
        if element is None:
            view.screenshot(path=picture)
        else:
            view.locator(element).screenshot(path=picture)
        browser.close()
    Image.open(picture).convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(picture, optimize=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = packprop.profile(*digits(), timeline=True)
    draw(found, 6, IMAGES / "report.png")
    draw(found, 6, IMAGES / "report_costs.png", "section[aria-labelledby=title-costs]")
    text = packprop.profile(*language_model(), decode=decode, curvature=False)
    draw(text, 3, IMAGES / "report_text.png", ".samples")
