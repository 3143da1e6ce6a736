"""Draw the badges of the README, which say what pyproject.toml says: ``python docs/make_badges.py``."""

from __future__ import annotations

import re
import tomllib
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "images" / "badges"
PIXELS_OF_A_LETTER = 6.6

BADGE = """<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="20" role="img"
aria-label="{label}: {value}">
<rect width="{whole}" height="20" rx="3" fill="#555"/>
<path d="M{left} 0h{inner}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3h-{inner}z" fill="#0072b2"/>
<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="{middle_left}" y="14" textLength="{text_left}">{label}</text>
<text x="{middle_right}" y="14" textLength="{text_right}">{value}</text>
</g>
</svg>
"""


def facts() -> dict[str, tuple[str, str]]:
    """Return what each badge says, by its name: a label and a value."""
    described: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = described["project"]
    (torch,) = [each for each in project["dependencies"] if re.match(r"torch\b", each)]
    types = "strict" if described["tool"]["mypy"]["strict"] else "checked"
    return {
        "version": ("packprop", project["version"]),
        "python": ("Python", project["requires-python"].replace(">=", "") + " or newer"),
        "torch": ("PyTorch", torch.removeprefix("torch>=") + " or newer"),
        "license": ("license", project["license"]),
        "types": ("mypy", types),
    }


def badge(label: str, value: str) -> str:
    """Return the drawing of one badge."""
    text_left, text_right = (round(PIXELS_OF_A_LETTER * len(text)) for text in (label, value))
    left, right = text_left + 12, text_right + 12
    return BADGE.format(
        label=escape(label),
        value=escape(value),
        whole=left + right,
        left=left,
        inner=right - 3,
        middle_left=left / 2,
        middle_right=left + right / 2,
        text_left=text_left,
        text_right=text_right,
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, said in facts().items():
        (FOLDER / f"{name}.svg").write_text(badge(*said), encoding="utf-8")
