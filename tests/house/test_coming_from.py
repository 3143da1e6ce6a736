"""What the pages for users of other libraries show runs, and comes out the same in both."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.house.pages import blocks_of, run
from tests.selection import one_in

# Page -> the library as the page calls it, and as it is imported.
PEERS = {
    "backpack": ("BackPACK", "backpack"),
    "curvlinops": ("curvlinops", "curvlinops"),
    "opacus": ("Opacus", "opacus"),
    "torch_func": ("torch.func", "torch.func"),
}


def pieces(name: str) -> tuple[str, list[str]]:
    page = f"docs/coming_from/{name}.md"
    return page, blocks_of(page)


@pytest.mark.parametrize("name", PEERS)
def test_packprop_alone(name: str) -> None:
    page, blocks = pieces(name)
    ours = [block for block in blocks if not block.startswith(f"# {PEERS[name][0]}")]
    assert len(ours) >= 3
    run(page, ours)


@one_in(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PEERS)
def test_both_agree(name: str) -> None:
    called, imported = PEERS[name]
    pytest.importorskip(imported)
    page, blocks = pieces(name)
    kinds = [block.partition("\n")[0] for block in blocks]
    assert min(kinds.count(f"# {called}"), kinds.count("# packprop")) >= 2
    assert kinds.count(f"# {called} and packprop") == kinds.count(f"# {called}")
    run(page, blocks)


def test_a_wrong_number_would_be_seen() -> None:
    page, blocks = pieces("torch_func")
    changed = copy.copy(blocks)
    where = next(i for i, block in enumerate(blocks) if block.startswith("# torch.func and packprop"))
    changed[where] = blocks[where].replace("len(x) * ", "2 * len(x) * ")
    with pytest.raises(AssertionError, match="not close"):
        run(page, changed)
    assert torch.is_grad_enabled()
