"""The page in a real browser, headless Chromium: drawn, sorted, filtered, resized, without errors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from packprop import examples
from packprop.applications.reports.compare import compare
from tests.reports.profiled import network, quiet

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytest.importorskip("altair")
pytest.importorskip("vl_convert")

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
WIDTHS = (390, 820, 1440)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    torch.manual_seed(0)
    model, data = network()
    found = quiet(model, nn.CrossEntropyLoss(), data, timeline=True)
    text = quiet(*examples.language_model(steps=0, samples=24), outliers=3, decode=examples.decode)
    return {
        "text": text.save_page(folder / "text.html"),
        "profile": found.save_page(folder / "profile.html"),
        "compare": compare(found, found, "a", "b").save_page(folder / "compare.html"),
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if BROWSER is None:
        pytest.skip("no Chromium is installed on this machine")
    with playwright.sync_playwright() as started:
        try:
            opened = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"Chromium does not start here: {str(error).splitlines()[0]}")
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page without network; whatever it asks of one, or says to the console, fails the test."""
    context = browser.new_context(viewport={"width": WIDTHS[-1], "height": 900}, offline=True)
    opened, said = context.new_page(), []
    opened.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    opened.on("pageerror", lambda error: said.append(f"error: {error}"))
    opened.on("request", lambda request: said.append(request.url) if request.url.startswith("http") else None)
    yield opened
    context.close()
    assert said == []


def opened(page: Any, path: Path, figures: int) -> Any:
    page.goto(path.as_uri())
    page.wait_for_function(f"document.querySelectorAll('.chart svg').length == {figures}")
    return page


def names(page: Any) -> list[str]:
    rows: list[str] = page.locator("#layers tbody tr:visible th").all_inner_texts()
    return rows


def test_sorting(page: Any, pages: dict[str, Path]) -> None:
    opened(page, pages["profile"], 6)
    order = names(page)
    assert len(order) == 4
    head = page.locator("#layers thead th").nth(2)
    numbers = "[...document.querySelectorAll('#layers tbody tr')].map(row => Number(row.cells[2].dataset.key))"
    given = page.evaluate(numbers)
    for direction, expected in [
        ("descending", sorted(given, reverse=True)),
        ("ascending", sorted(given)),
        ("none", given),
    ]:
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == direction
        assert page.evaluate(numbers) == expected
    page.locator("#layers thead button").first.focus()
    page.keyboard.press("Enter")
    assert names(page) == sorted(order, key=str.lower)
    # what was not computed stands last in both directions
    for _ in range(2):
        page.locator("#layers thead th").nth(8).locator("button").click()
        assert page.locator("#layers tbody tr").last.locator("td").nth(7).inner_text() == "-"


def test_filtering(page: Any, pages: dict[str, Path]) -> None:
    opened(page, pages["profile"], 6)
    page.get_by_label("Filter layers").fill("CONV")
    assert names(page) == ["conv"]
    assert page.locator("#shown").inner_text() == "1 of 4 layers"
    page.get_by_label("Filter layers").fill("nothing like that")
    assert names(page) == []
    page.get_by_label("Filter layers").fill("")
    assert len(names(page)) == 4


@pytest.mark.parametrize(("kind", "figures"), [("profile", 6), ("compare", 4), ("text", 5)])
def test_widths_and_colours(page: Any, pages: dict[str, Path], kind: str, figures: int) -> None:
    opened(page, pages[kind], figures)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(
            "Math.max(...[...document.querySelectorAll('.chart svg')].map(drawing => drawing.clientWidth))"
            f" <= {width}"
        )
        assert page.evaluate("document.documentElement.scrollWidth") == width
    colours = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2
    label = page.locator(".chart svg text").first
    assert label.evaluate("element => getComputedStyle(element).fill") not in ("rgb(0, 0, 0)", "none")


def test_shaded_tokens(page: Any, pages: dict[str, Path]) -> None:
    opened(page, pages["text"], 5)
    tokens = page.locator(".samples blockquote span")
    assert tokens.count() == 3 * 64
    shades = tokens.evaluate_all("spans => spans.map(span => getComputedStyle(span).backgroundColor)")
    assert len(set(shades)) > 10
    assert str(tokens.first.get_attribute("title")).startswith("loss ")


def test_what_a_screen_reader_gets(page: Any, pages: dict[str, Path]) -> None:
    opened(page, pages["profile"], 6)
    assert page.get_by_role("img", name="Signal to noise of 4 layers").count() == 1
    assert page.get_by_role("heading", level=1).count() == 1
    assert page.get_by_role("table").count() >= 1
    page.locator("summary").first.click()
    assert page.get_by_role("region", name="Numbers: Signal and noise, layer by layer").is_visible()


def test_paper(page: Any, pages: dict[str, Path]) -> None:
    opened(page, pages["profile"], 6)
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.get_by_label("Filter layers").is_visible()
    assert len(page.pdf(format="A4")) > 10_000
