"""The HTML of a page, as a browser reads it: elements with their attributes and texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from html.parser import HTMLParser

VOID = {"meta", "link", "img", "input", "br", "wbr"}


@dataclasses.dataclass
class Element:
    """An element, with the elements and texts inside of it."""

    tag: str
    attributes: dict[str, str | None]
    inside: list[Element | str] = dataclasses.field(default_factory=list)

    def all(self, tag: str = "", **attributes: str) -> list[Element]:
        """All elements below it of this tag, with these attributes (``class_`` for class)."""
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        return [
            each
            for each in self.below()
            if tag in ("", each.tag)
            and all(each.attributes.get(name) == value for name, value in wanted.items())
        ]

    def below(self) -> Iterator[Element]:
        for each in self.inside:
            if isinstance(each, Element):
                yield each
                yield from each.below()

    @property
    def text(self) -> str:
        return "".join(each if isinstance(each, str) else each.text for each in self.inside)


class Reader(HTMLParser):
    """Reads a page, and fails where elements are not closed in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Element("root", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self._open[-1].inside.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self._open[-1].inside.append(data)

    def closed(self) -> bool:
        return len(self._open) == 1


def read_page(html: str) -> Element:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.closed()
    return reader.root
