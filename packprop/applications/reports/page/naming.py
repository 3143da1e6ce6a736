"""Short names of layers, without the part that many names have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

LONGEST_LABEL = 28
"""The most characters of a layer's name in a figure."""


def folded_names(names: Sequence[str]) -> dict[str, str]:
    """Return each name without the beginning that at least half of them share; whole if all are short.

    >>> [*folded_names(["bert.encoder.layer.0.query.proj", "bert.encoder.layer.1.query.proj", "head"]).values()]
    ['…0.query.proj', '…1.query.proj', 'head']
    """
    if max(map(len, names), default=0) <= LONGEST_LABEL:
        return {name: name for name in names}
    starts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        starts.update(".".join([*parts[:count], ""]) for count in range(1, len(parts)))
    shared = [start for start, often in starts.items() if often >= max(2, len(names) / 2)]
    start = max(shared, key=len, default="")
    return {name: f"…{name[len(start) :]}" if start and name.startswith(start) else name for name in names}


def short_labels(names: Sequence[str]) -> dict[str, str]:
    """Return a short label for each name, no two alike: the folded name, without middle parts if it is long.

    >>> [*short_labels(["bert.layer.0.attention.output.LayerNorm", "bert.layer.1.query"]).values()]
    ['…0.attention…LayerNorm', '…1.query']
    """
    labels: dict[str, str] = {}
    for name, folded in folded_names(names).items():
        taken = labels.values()
        labels[name] = next((label for label in _shortened(folded) if label not in taken), name)
    return labels


def _shortened(folded: str) -> Iterator[str]:
    """Yield labels that fit, the plainest first: a folded name, its first parts and its end, or its end."""
    if len(folded) <= LONGEST_LABEL:
        yield folded
    parts = folded.removeprefix("…").split(".")
    for kept in (2, 1, 0) if folded.startswith("…") else (0,):
        beginning = f"…{'.'.join(parts[:kept])}…" if kept else "…"
        for start in range(kept + 1, len(parts)):
            label = beginning + ".".join(parts[start:])
            if len(label) <= LONGEST_LABEL:
                yield label
    yield f"…{folded[1 - LONGEST_LABEL :]}"
