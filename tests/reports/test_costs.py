"""What each quantity takes in each layer, and the parts of a pass that humps of memory belong to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from packprop import Profile, examples
from packprop.applications.reports.profile.costs import TITLES, Noted, phases_of, sweeps_of
from packprop.applications.reports.profile.layers import TOTAL
from tests.reports.pages import read_page
from tests.reports.profiled import quiet
from tests.selection import thorough

PARTS = ["forward pass", "inputs", "drawn columns", "exact columns", "gradients"]


@pytest.fixture(scope="module")
def profile() -> Profile:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 200), nn.Tanh(), nn.Linear(200, 3))
    data = (torch.randn(64, 30), torch.randint(3, (64,)))
    return quiet(model, nn.CrossEntropyLoss(), data, timeline=True)


def test_every_quantity_is_measured_in_every_layer(profile: Profile) -> None:
    assert profile.memory is not None
    costs = {(cost.layer, cost.quantity): cost for cost in profile.memory.costs}
    assert {*costs} == {(layer, quantity) for layer in ("0", "2", TOTAL) for quantity in TITLES.values()}
    for quantity in TITLES.values():
        single = [costs[layer, quantity] for layer in ("0", "2")]
        assert all(cost.seconds > 0 for cost in single)
        assert sum(cost.seconds for cost in single) <= costs[TOTAL, quantity].seconds
        assert max(cost.bytes for cost in single) <= costs[TOTAL, quantity].bytes


def test_bytes_are_those_of_the_layer(profile: Profile) -> None:
    """The factors of the wide layer alone are larger than all that the norms take."""
    assert profile.memory is not None
    sizes = {(cost.layer, cost.quantity): cost.bytes for cost in profile.memory.costs}
    assert sizes["2", "Kronecker factors"] >= 4 * 200 * 200
    assert sizes["0", "Kronecker factors"] >= 4 * 200 * 200
    assert sizes["2", "sample norms"] < 4 * 200 * 64


def test_parts_cover_the_pass_in_their_order(profile: Profile) -> None:
    use = profile.memory
    assert use is not None
    assert [name for name, _, _ in use.phases] == PARTS
    assert use.phases[0] == ("forward pass", 0, use.forward)
    for before, after in zip(use.phases, use.phases[1:], strict=False):
        assert before[2] == after[1] < after[2] <= use.operations
    assert use.phases[-1][2] == use.operations


@thorough
def test_several_draws_and_chunks_of_columns_stay_one_part() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 10))
    data = (torch.randn(64, 1, 8, 8), torch.randint(10, (64,)))
    use = quiet(model, nn.CrossEntropyLoss(), data, timeline=True, mc_samples=3, memory="4MiB").memory
    assert use is not None
    assert [name for name, _, _ in use.phases] == PARTS


@thorough
def test_a_model_that_computes_its_loss_has_parts() -> None:
    use = quiet(*examples.language_model(steps=0, samples=8), timeline=True).memory
    assert use is not None
    assert [name for name, _, _ in use.phases] == [part for part in PARTS if part != "exact columns"]


def test_parts_that_do_not_add_up_have_no_names() -> None:
    visits = [("a", 1, 0.0, 3), ("a", 1, 0.0, 4), ("b", 2, 0.0, 5), ("a", 1, 0.0, 6), ("b", 2, 0.0, 8)]
    noted = Noted(forward=(0.0, 2), visits=visits)
    assert sweeps_of(noted) == [5, 8]
    assert phases_of(noted, [], []) == []


@thorough
def test_the_page_shows_them(profile: Profile) -> None:
    page = read_page(profile.to_html())
    (table,) = page.all("table", class_="costs")
    assert [head.text for head in table.all("thead")[0].all("th")] == ["layer", *TITLES.values()]
    assert [row.all("th")[0].text for row in table.all("tbody")[0].all("tr")] == ["0", "2"]
    assert len(table.all("td")) == 3 * len(TITLES)
    assert " takes longest: " in page.text
    assert "#title-costs" in [link.attributes.get("href") for link in page.all("a")]
    assert "The peak is in the " in page.text
    assert "Peak of each part: forward pass" in page.text


@thorough
def test_without_a_timeline_nothing_is_measured() -> None:
    model = nn.Linear(3, 2)
    found = quiet(model, nn.CrossEntropyLoss(), (torch.randn(9, 3), torch.randint(2, (9,))))
    page = read_page(found.to_html())
    assert not page.all("table", class_="costs")
    assert "takes longest" not in page.text


@thorough
def test_a_batch_that_takes_long_is_not_run_for_each_quantity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packprop.applications.reports.profile.costs.PATIENCE", 0.0)
    data = (torch.randn(9, 3), torch.randint(2, (9,)))
    found = quiet(nn.Linear(3, 2), nn.CrossEntropyLoss(), data, timeline=True)
    assert found.memory is not None
    assert (found.memory.costs, found.memory.phases) == ([], [])
    assert "Not measured: the pass over the first batch took 0 s" in read_page(found.to_html()).text
    assert found.memory.timeline


class Uncommon(nn.Module):
    """Tied weights, a module that is called twice, a recurrent layer, a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)
        self.head.weight = self.words.weight
        self.mix, self.memory = nn.Linear(6, 6), nn.GRU(6, 6, batch_first=True)
        self.shift = nn.Parameter(torch.zeros(6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.mix(self.mix(self.words(tokens)).tanh())
        scores: torch.Tensor = self.head(self.memory(hidden)[0] + self.shift)
        return scores.transpose(1, 2)


@thorough
def test_a_model_out_of_the_ordinary_is_measured_without_warnings(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(11, (20, 6))
    data = (tokens[:, :-1], tokens[:, 1:])
    without = quiet(Uncommon(), nn.CrossEntropyLoss(), data)
    said = len(recwarn)
    found = quiet(Uncommon(), nn.CrossEntropyLoss(), data, timeline=True)
    assert len(recwarn) == 2 * said
    assert found.memory is not None
    assert found.memory.why_no_costs is None
    assert {cost.layer for cost in found.memory.costs} == {layer.name for layer in without.layers} | {TOTAL}
