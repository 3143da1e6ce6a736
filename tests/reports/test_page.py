"""The page of a profile: what it holds, that it needs nothing else, and that everybody can read it."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from packprop import BadInput, PackpropError, Profile, examples
from packprop.applications.reports import cli
from packprop.applications.reports.page import figure, findings, libraries, naming
from packprop.applications.reports.page.memory import REASONS
from packprop.applications.reports.profile.uncertainty import signal_to_noise_interval
from tests.reports.factories import Run
from tests.reports.pages import Element, read_page
from tests.reports.profiled import network, quiet
from tests.selection import thorough

pytest.importorskip("altair")
pytest.importorskip("vl_convert")


@pytest.fixture(scope="module")
def profile() -> Profile:
    torch.manual_seed(0)
    model, (x, y) = network()
    data = (torch.cat([x, x, 8 * x]), torch.cat([y, y, y]))
    return quiet(model, nn.CrossEntropyLoss(), data, timeline=True, memory="64MiB", outliers=4)


@pytest.fixture(scope="module")
def page(profile: Profile) -> Element:
    return read_page(profile.to_html())


def charts(page: Element) -> dict[str, Any]:
    scripts = page.all("script", type="application/json")
    return {str(script.attributes["data-chart"]): json.loads(script.text) for script in scripts}


@thorough
def test_it_is_one_small_file_that_needs_no_network(profile: Profile) -> None:
    html = profile.to_html()
    assert len(html.encode()) < 2_000_000
    page = read_page(html)
    for element in page.below():
        for name in ("src", "href", "data", "action", "poster"):
            address = element.attributes.get(name)
            assert address is None or address.startswith(("data:", "#")), (element.tag, address)
    for style in page.all("style"):
        assert "@import" not in style.text
        assert "url(" not in style.text


def test_figures_have_words_and_tables(page: Element, profile: Profile) -> None:
    keys = ["signal", "norms", "norms-by-layer", "curvature", "spectra", "memory"]
    assert [*charts(page)] == keys
    figures = page.all("figure")
    assert len(figures) == len(keys)
    for each in figures:
        (drawing,) = each.all("div", class_="chart")
        assert drawing.attributes["role"] == "img"
        assert len(str(drawing.attributes["aria-label"])) > 40
        assert each.attributes["aria-labelledby"] in [title.attributes.get("id") for title in each.below()]
        (table,) = each.all("table")
        assert len(table.all("tr")) > 2
        assert all(head.attributes["scope"] in ("col", "row") for head in table.all("th"))


def test_drawings_have_the_numbers_of_the_profile(page: Element, profile: Profile) -> None:
    drawn = {key: str(chart) for key, chart in charts(page).items()}
    for layer in profile.layers:
        assert str(layer.signal_to_noise) in drawn["signal"]
        assert str(layer.ggn_trace_exact) in drawn["curvature"]
        assert layer.name in drawn["spectra"]
    norms = charts(page)["norms"]
    (bins,) = [rows for rows in norms["datasets"].values() if "samples" in rows[0]]
    assert sum(row["samples"] for row in bins) == profile.samples
    assert profile.memory is not None
    assert profile.memory.planned is not None
    assert "peak by the plan" in drawn["memory"]


def test_colours_are_those_of_the_style_sheet(page: Element) -> None:
    for chart in charts(page).values():
        assert not re.findall(r"'#[0-9a-fA-F]{3,8}'", str(chart))
    (style,) = page.all("style")
    assert "prefers-color-scheme: dark" in style.text
    assert "@media print" in style.text
    assert "max-width: 640px" in style.text


def test_outlying_samples_are_shown(page: Element, profile: Profile) -> None:
    pictures = page.all("img")
    assert len(pictures) == len(profile.outlying) == 4
    for picture, sample in zip(pictures, profile.outlying, strict=True):
        assert str(picture.attributes["src"]).startswith("data:image/png;base64,")
        assert picture.attributes["alt"] == f"Picture of sample {sample.place}, a {sample.target}"
    (list_of_samples,) = page.all("ol")
    assert f"no. {profile.outlying[0].place}" in list_of_samples.text
    assert "model: " in list_of_samples.text


def test_the_table_of_layers(page: Element, profile: Profile) -> None:
    (table,) = page.all("table", id="layers")
    assert len(table.all("button")) == 10
    rows = [row for body in table.all("tbody") for row in body.all("tr")]
    assert [row.all("th")[0].text for row in rows] == [layer.name for layer in profile.layers]
    assert [row.all("td")[1].attributes["data-key"] for row in rows] == [
        str(layer.parameters) for layer in profile.layers
    ]
    (box,) = page.all("input")
    assert page.all("label", for_=str(box.attributes["id"]))


def test_what_the_plan_chose_and_why(page: Element, profile: Profile) -> None:
    assert profile.memory is not None
    for choice in profile.memory.choices:
        assert choice["parameter"] in page.text
        assert REASONS[choice["algorithm"]] in page.text
    assert "the budget is 64 MiB" in page.text


def test_the_findings(profile: Profile) -> None:
    said = [finding.says for finding in findings.findings_of(profile)]
    assert any("noise is as large as signal" in text or "nothing but noise" in text for text in said)
    assert any("of the gradients" in text for text in said)
    assert any("of the curvature" in text for text in said)
    assert any(text.startswith("The pass over a batch of 36 took") for text in said)
    share = 1 / profile.total.signal_to_noise  # type: ignore[operator]  # it is a number
    assert findings.noise_scale(profile) == share
    few = dataclasses.replace(profile, samples=int(share) - 1) if share > 2 else None
    if few is not None:
        assert findings.findings_of(few)[0].says == "The gradient may be nothing but noise."


def test_a_small_share_of_the_parameters_is_not_zero(profile: Profile) -> None:
    """A head of a large model has a fraction of a percent of its parameters, and most of the curvature."""
    total = dataclasses.replace(profile.total, parameters=500 * profile.total.parameters)
    (found,) = (
        each
        for each in findings.findings_of(dataclasses.replace(profile, total=total))
        if "of the curvature" in each.says
    )
    (share,) = re.findall(r"with ([\d.]+)% of the parameters", found.because)
    assert 0 < float(share) < 1


def test_labels_of_a_logarithmic_axis_keep_apart() -> None:
    _, axis = figure.log_axis(1e-6, 1.0)
    assert axis.labelSeparation > 0


def test_what_was_not_computed_is_left_out_and_named() -> None:
    model, data = network()
    found = quiet(model, nn.CrossEntropyLoss(), data, curvature=False, outliers=0)
    page = read_page(found.to_html())
    assert [*charts(page)] == ["signal", "norms", "norms-by-layer"]
    assert "No timeline of memory: packprop.profile(..., timeline=True)" in page.text
    assert "with the largest gradients: packprop.profile(..., outliers=0) kept none" in page.text


@thorough
@pytest.mark.parametrize("change", ["one sample", "infinite", "no gradient"])
def test_profiles_without_numbers(change: str) -> None:
    model, (x, y) = network()
    if change == "one sample":
        x, y = x[:1], y[:1]
    if change == "infinite":
        x = x / 0
    if change == "no gradient":
        for parameter in model.parameters():
            parameter.data.zero_()
    found = quiet(model, nn.CrossEntropyLoss(), (x, y), timeline=True)
    page = read_page(found.to_html())
    assert len(page.all("tbody")[-1].all("tr")) == 4


def test_names_and_texts_stay_texts() -> None:
    evil = "</script><script>alert(1)</script>"
    model = nn.Sequential()
    model.add_module(evil, nn.Linear(3, 2))
    found = quiet(
        model, nn.CrossEntropyLoss(), (torch.randn(9, 3), torch.randint(2, (9,))), decode=lambda x, y: evil
    )
    html = found.to_html()
    page = read_page(html)
    assert "alert(1)" not in "".join(script.text for script in page.all("script") if not script.attributes)
    assert evil in page.all("blockquote")[0].text
    assert evil in page.all("table", id="layers")[0].text


class LanguageModel(nn.Module):
    """One layer of a transformer over twelve letters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.tokens(tokens)))
        return logits.transpose(1, 2)


def test_a_language_model() -> None:
    tokens = torch.randint(12, (20, 7))

    def decode(inputs: Tensor, targets: Tensor) -> str:
        return "".join("abcdefghijkl"[token] for token in inputs.tolist())

    data = (tokens[:, :-1], tokens[:, 1:])
    found = quiet(LanguageModel(), nn.CrossEntropyLoss(), data, outliers=3, decode=decode)
    page = read_page(found.to_html())
    shown = [quote.text for quote in page.all("blockquote")]
    assert shown == [decode(data[0][sample.place], data[1][sample.place]) for sample in found.outlying]
    assert "layer.self_attn" in str(charts(page)["spectra"])
    (samples,) = page.all("ol")
    assert samples.attributes["class"] == "samples texts"
    assert "tokens right" in samples.text
    assert not samples.all("span")


def test_tokens_are_shaded_by_their_losses() -> None:
    model, loss, windows = examples.language_model(steps=0, samples=20)
    found = quiet(model, loss, windows, curvature=False, outliers=2, decode=examples.decode)
    page = read_page(found.to_html())
    quotes = page.all("blockquote")
    for quote, sample in zip(quotes, found.outlying, strict=True):
        assert quote.text.replace("↵", "") == sample.text
        assert sample.token_losses is not None
        most = max(loss for each in found.outlying for loss in each.token_losses or [] if loss is not None)
        shades = [str(span.attributes["style"]) for span in quote.all("span")]
        assert shades == [f"--loss: {round(100 * (loss or 0) / most)}%" for loss in sample.token_losses]
    (samples,) = page.all("ol")
    assert samples.text.count("hardest token") == 2
    assert "The darker a token, the larger its loss." in str([note.text for note in page.all("p")])


def test_many_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure, "MOST_LAYERS", 5)
    names = [f"{'a_very_long_name_of_a_module' * (i % 2)}{i}" for i in range(8)]
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(3, 3))
    found = quiet(model, nn.MSELoss(), (torch.randn(20, 3), torch.randn(20, 3)))
    page = read_page(found.to_html())
    assert "Of 8 layers, the 5 with the largest values are shown." in page.text
    (table,) = page.all("table", id="layers")
    assert len(table.all("tbody")[0].all("tr")) == 8
    assert len({label for rows in charts(page)["signal"]["datasets"].values() for label in map(str, rows)}) > 4
    labels = naming.short_labels(names)
    assert len({*labels.values()}) == 8
    assert max(map(len, labels.values())) <= naming.LONGEST_LABEL


def test_short_labels_that_would_be_alike_stay_long() -> None:
    names = [f"{first}{'x' * 40}" for first in "ab"]
    assert naming.short_labels(names) == {names[0]: "…" + "x" * 27, names[1]: names[1]}


# In a notebook, from files, from the command line


def test_a_notebook_shows_it(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = profile._repr_mimebundle_()
    assert bundle["text/plain"] == str(profile)
    page = read_page(bundle["text/html"])
    assert [row.all("th")[0].text for row in page.all("tbody")[0].all("tr")] == [
        layer.name for layer in profile.layers
    ]
    assert not page.all("script")
    monkeypatch.setattr(libraries, "missing", lambda names: [*names])
    assert [*profile._repr_mimebundle_()] == ["text/plain"]


@thorough
def test_a_profile_from_files_has_the_same_page(profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path)
    again = Profile.load(tmp_path)
    assert again == profile
    assert again.to_html() == profile.to_html()
    assert again.save_page(tmp_path / "page.html").read_text() == profile.to_html()
    with pytest.raises(BadInput, match="cannot be written"):
        profile.save_page(tmp_path / "no" / "folder.html")


@thorough
def test_the_command_writes_it(run: Run, tmp_path: Path) -> None:
    status, _, err = run("factories:good", "--page", "--memory", "64MiB")
    assert status == 0
    assert "profile/profile.safetensors and profile/profile.html" in err
    assert err.splitlines()[-1] == "open profile/profile.html in a browser"
    written = (tmp_path / "profile" / "profile.html").read_text()
    assert "the budget is 64 MiB" in written
    assert cli.main(["page", "profile", "--output", "again.html"]) == 0
    assert (tmp_path / "again.html").read_text() == written


def test_without_the_libraries(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None if name == "altair" else name)
    status, out, err = run("factories:good", "--page")
    assert (status, out.count("Sequential: CrossEntropyLoss")) == (0, 1)
    (line,) = [line for line in err.splitlines() if "page" in line]
    then = "pip install '.[report]', then: packprop page profile"
    assert line == f"no page with figures: altair cannot be imported; {then}"
    assert err.splitlines()[-1] == line
    assert not (tmp_path / "profile" / "profile.html").exists()
    with pytest.raises(PackpropError, match="altair cannot be imported") as error:
        Profile.load("profile").to_html()
    assert error.value.instead == "pip install '.[report]'"
    assert cli.main(["page", "profile"]) == 2


def test_a_page_that_cannot_be_written_is_refused_before_the_work(run: Run, tmp_path: Path) -> None:
    (tmp_path / "profile" / "profile.html").mkdir(parents=True)
    status, _, err = run("factories:marks", "--page")
    assert status == 2
    assert "profile.html in it is a folder" in err
    assert not (tmp_path / "ran").exists()


def test_tensors_stay_as_they_are(profile: Profile) -> None:
    before = {name: tensor.clone() for name, tensor in profile.tensors.items()}
    profile.to_html()
    for name, tensor in profile.tensors.items():
        assert isinstance(tensor, Tensor)
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)


def test_findings_and_contents_lead_to_what_is_there(page: Element) -> None:
    places = {f"#{element.attributes.get('id')}" for element in page.below()}
    links = [element.attributes.get("href") for element in page.all("a")]
    assert len(links) >= 8
    assert {*links} <= places


def test_signal_to_noise_has_an_interval(profile: Profile) -> None:
    """The bound of the note, computed apart: twice that of the ratio and of the covariance."""
    norms = profile.tensors["sample_gradient_norm/(total)"].double()
    ratio, count = profile.total.signal_to_noise, len(norms)
    assert ratio is not None
    assert profile.total.gradient_norm is not None
    noise = float(norms.square().mean()) - profile.total.gradient_norm**2
    error = ratio * (2 / (count * ratio) ** 0.5 + float(norms.square().std()) / count**0.5 / noise)
    interval = signal_to_noise_interval(profile.total, norms)
    assert interval == pytest.approx((max(0.0, ratio - 2 * error), ratio + 2 * error))
    assert signal_to_noise_interval(profile.total, norms[:1]) is None
    assert interval[0] == 0
    assert f"place it above {float(f'{1 / interval[1]:.1e}'):g}." in profile.to_html()


def test_long_names_of_many_layers_keep_their_number_and_their_end() -> None:
    ends = ("self.query", "self.dropout.projection", "output.dense", "output.LayerNorm")
    names = [f"bert.encoder.layer.{layer}.attention.{end}" for layer in range(2) for end in ends]
    labels = naming.short_labels(["bert.embeddings.token_type_embeddings", *names])
    assert [*labels.values()][:5] == [
        "…token_type_embeddings",
        "…0.attention.self.query",
        "…0.attention…projection",
        "…0.attention.output.dense",
        "…0.attention…LayerNorm",
    ]
    assert len({*labels.values()}) == len(names) + 1


def test_names_of_many_layers_are_folded_and_whole_on_hover() -> None:
    names = [f"encoder.layers.{at}.attention.projection" for at in range(12)] + ["classifier"]
    folded = naming.folded_names(names)
    assert [folded[name] for name in (names[0], names[11], names[-1])] == [
        "…0.attention.projection",
        "…11.attention.projection",
        "classifier",
    ]
    assert naming.folded_names(["a.b", "a.c"]) == {"a.b": "a.b", "a.c": "a.c"}
    assert len({*naming.short_labels(names).values()}) == len(names)
