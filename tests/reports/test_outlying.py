"""The samples with the largest gradients: the right ones, from data of any form, as pictures or words."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from packprop import BadInput, Profile
from packprop.applications.reports.profile.outlying import SIDE, picture_of, text_of
from tests.reports.profiled import quiet

INPUTS = torch.rand(30, 1, 4, 4, generator=torch.Generator().manual_seed(0))
INPUTS[[4, 17, 29]] *= torch.tensor([9.0, 7.0, 5.0]).view(3, 1, 1, 1)
CLASSES = torch.arange(30) % 3
LARGEST = [4, 29, 17]


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


class OneByOne(Dataset[Any]):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return INPUTS[index], int(CLASSES[index])

    def __len__(self) -> int:
        return 30


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return ((INPUTS[i], int(CLASSES[i])) for i in range(30))


def found_in(data: Any, **options: Any) -> Profile:
    return quiet(model(), nn.CrossEntropyLoss(), data, curvature=False, outliers=3, **options)


FORMS = {
    "tensors": lambda: (INPUTS, CLASSES),
    "dataset": OneByOne,
    "stream": Stream,
    "list": lambda: [(INPUTS[i : i + 8], CLASSES[i : i + 8]) for i in range(0, 30, 8)],
    "loader": lambda: DataLoader(TensorDataset(INPUTS, CLASSES), batch_size=7),
    "shuffled": lambda: DataLoader(TensorDataset(INPUTS, CLASSES), batch_size=7, shuffle=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_they_are_found_in_data_of_any_form(form: str) -> None:
    found = found_in(FORMS[form]())
    assert found.missing.keys() == {"memory"}
    norms = found.tensors["sample_gradient_norm/(total)"]
    expected = model().requires_grad_(False)
    for rank, sample in enumerate(found.outlying):
        assert sample.norm == float(norms[sample.place])
        original = LARGEST[rank]
        if form != "shuffled":
            assert sample.place == original
        assert sample.target == str(int(CLASSES[original]))
        assert sample.picture is not None
        assert torch.equal(found.tensors[sample.picture], picture_of(INPUTS[original]))  # type: ignore[arg-type]  # it has a picture
        outputs = expected(INPUTS[original : original + 1])
        loss = nn.functional.cross_entropy(outputs, CLASSES[original : original + 1])
        assert sample.loss == pytest.approx(float(loss), rel=1e-5)
        chance, said = outputs.softmax(1).max(1)
        assert sample.output == f"{int(said)} ({float(chance):.0%})"


def test_a_shuffled_loader_and_the_random_state_are_left_alone() -> None:
    torch.manual_seed(3)
    found_in(FORMS["shuffled"]())
    after = torch.get_rng_state()
    torch.manual_seed(3)
    quiet(model(), nn.CrossEntropyLoss(), FORMS["shuffled"](), curvature=False, outliers=0)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("form", ["data set", "loader"])
def test_looking_at_single_samples_draws_nothing(form: str) -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return x + random.random() * torch.rand(()), y

    def after(outliers: int) -> tuple[Any, list[int]]:
        random.seed(0)
        torch.manual_seed(0)
        data = Noisy(INPUTS, CLASSES)
        given = data if form == "data set" else DataLoader(data, batch_size=4)
        quiet(model(), nn.CrossEntropyLoss(), given, curvature=False, outliers=outliers)
        return random.getstate(), torch.get_rng_state().tolist()

    assert after(1) == after(0)


class Drawn:
    """Other data at each reading."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        source = torch.Generator()
        source.seed()
        for _ in range(3):
            yield torch.rand(5, 16, generator=source), torch.zeros(5, dtype=torch.long)


def test_what_cannot_be_read_again_is_said() -> None:
    once = found_in(iter(FORMS["list"]()))
    assert once.outlying == []
    assert "they can be read once" in once.missing["outlying"]
    drawn = found_in(Drawn())
    assert drawn.outlying == []
    assert "they differ from one reading to the next" in drawn.missing["outlying"]
    assert found_in((INPUTS, CLASSES)).missing.keys() == {"memory"}


def test_tokens_and_numbers_are_written_down() -> None:
    tokens = torch.randint(50, (6, 80))
    network = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(320, 2))
    found = quiet(network, nn.CrossEntropyLoss(), (tokens, CLASSES[:6] % 2), outliers=2)
    for sample in found.outlying:
        text = " ".join(map(str, tokens[sample.place, :64].tolist()))
        assert sample.text == f"{text} ... (80 in all)"
        assert sample.picture is None
    assert text_of(torch.tensor([0.123456, 2.0])) == "0.123 2"


def test_decode_says_what_a_sample_is() -> None:
    found = found_in((INPUTS, CLASSES), decode=lambda x, y: f"{[*x.shape]} of class {int(y)}")
    assert [sample.text for sample in found.outlying] == [
        f"[1, 4, 4] of class {int(CLASSES[place])}" for place in LARGEST
    ]
    pictured = found_in((INPUTS, CLASSES), decode=lambda x, y: x.expand(3, 4, 4))
    assert pictured.tensors["outlying_sample/4"].shape == (4, 4, 3)


class Letters(nn.Module):
    """Logits ``[n, t, 5]`` of tokens ``[n, t]``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(5, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.table(tokens)
        return logits


def over_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_a_text_in_pieces_with_the_loss_of_each(tmp_path: Path) -> None:
    data = torch.arange(42).view(6, 7) % 5, (torch.arange(42) * 3).view(6, 7) % 5
    found = quiet(
        Letters(), over_tokens, data, outliers=2, decode=lambda x, y: ["abcde"[token] for token in y.tolist()]
    )
    for sample in found.outlying:
        inputs, targets = (each[sample.place] for each in data)
        assert sample.pieces == ["abcde"[token] for token in targets.tolist()]
        assert sample.text == "".join(sample.pieces)
        losses = nn.functional.cross_entropy(Letters()(inputs), targets, reduction="none")
        assert sample.token_losses == pytest.approx(losses.tolist())
    found.save(tmp_path)
    assert Profile.load(tmp_path).outlying == found.outlying


def test_pieces_that_are_not_those_of_the_tokens() -> None:
    data = torch.arange(42).view(6, 7) % 5, (torch.arange(42) * 3).view(6, 7) % 5
    found = quiet(Letters(), over_tokens, data, decode=lambda x, y: ["one", "two"])
    assert found.missing["outlying"].endswith("it returned 2 pieces of text for 7 tokens")
    assert found.total.gradient_norm is not None


@pytest.mark.parametrize(
    ("decode", "why"),
    [
        (lambda x, y: 1 / 0, "ZeroDivisionError"),
        (lambda x, y: 3, "it returned int"),
        (lambda x, y: [], "it returned list"),
        (lambda x, y: ["a", 1], "it returned list"),
        (lambda x, y: torch.zeros(2), r"it returned a tensor \[2\]"),
    ],
)
def test_a_decode_that_fails(decode: Any, why: str) -> None:
    with pytest.raises(BadInput, match=why) as error:
        found_in((INPUTS, CLASSES), decode=decode)
    assert error.value.where == "decode, for sample 0"


def test_what_fails_after_the_work_costs_the_samples_alone() -> None:
    def decode(x: Tensor, y: Tensor) -> str:
        return "fine" if float(x.max()) < 2 else ""[3]

    found = found_in((INPUTS, CLASSES), decode=decode)
    assert found.outlying == []
    assert found.missing["outlying"].startswith("decode, for sample 4: IndexError")
    assert found.total.gradient_norm is not None

    class Breaking(OneByOne):
        reads = 0

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            self.reads += 1
            if self.reads > 30:
                raise OSError("the disk is gone")
            return super().__getitem__(index)

    found = found_in(Breaking())
    assert found.missing["outlying"].startswith("OSError: the disk is gone")
    assert found.total.gradient_norm is not None


def test_a_shared_tensor_stays_whole() -> None:
    """A mask ``[t, t]`` has as many rows as most batches have samples; the last batch shows what it is."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            scores: Tensor = self.head(x @ mask)
            return scores

    x, mask, y = torch.rand(10, 4), torch.rand(4, 4).tril(), CLASSES[:10]
    batches = [((x[at : at + 4], mask), y[at : at + 4]) for at in range(0, 10, 4)]
    found = quiet(Masked(), nn.CrossEntropyLoss(), batches, outliers=3)
    for sample in found.outlying:
        at = slice(sample.place, sample.place + 1)
        loss = nn.functional.cross_entropy(Masked()(x[at], mask), y[at])
        assert sample.loss == pytest.approx(float(loss), rel=1e-5)


def test_tokens_of_a_mapping() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 3)

        def forward(self, attention_mask: Tensor, input_ids: Tensor) -> Tensor:
            return (self.table(input_ids) * attention_mask[..., None]).sum(1)

    tokens = torch.randint(9, (5, 4))
    batch = {"attention_mask": torch.ones(5, 4), "input_ids": tokens, "labels": CLASSES[:5]}
    found = quiet(Summed(), nn.CrossEntropyLoss(), [batch], outliers=1)
    (sample,) = found.outlying
    assert sample.text == " ".join(map(str, tokens[sample.place].tolist()))
    assert sample.target == str(int(CLASSES[sample.place]))


@pytest.mark.parametrize(
    ("options", "where"),
    [({"outliers": -1}, "outliers=-1"), ({"outliers": True}, "outliers=True"), ({"decode": 3}, "decode, int")],
)
def test_bad_input(options: dict[str, Any], where: str) -> None:
    with pytest.raises(BadInput) as error:
        quiet(model(), nn.CrossEntropyLoss(), (INPUTS, CLASSES), **options)
    assert error.value.where == where


def test_a_model_that_wants_more_than_one_sample_says_nothing_of_one() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 1:
                raise ValueError("too few")
            return self.inner(x)

    found = quiet(Pairs(), nn.CrossEntropyLoss(), (INPUTS, CLASSES), curvature=False, outliers=1)
    assert (found.outlying[0].loss, found.outlying[0].output) == (None, None)
    assert found.outlying[0].target == "1"


def test_pictures() -> None:
    plain = picture_of(torch.full((4, 4), 7.0))
    assert plain is not None
    assert not plain.any()
    grey = picture_of(torch.tensor([[0.0, 1.0] * 2] * 4))
    assert grey is not None
    assert grey.tolist() == [[0, 255] * 2] * 4
    shifted = picture_of(torch.tensor([[-1.0, 3.0] * 2] * 4))
    assert shifted is not None
    assert shifted.tolist() == [[0, 255] * 2] * 4
    coloured = picture_of(torch.full((3, 5, 4), 100, dtype=torch.uint8))
    assert coloured is not None
    assert (coloured.shape, int(coloured.max())) == ((5, 4, 3), 100)
    large = picture_of(torch.rand(3, 400, 200))
    assert large is not None
    assert large.shape == (SIDE, SIDE // 2, 3)
    for other in (torch.rand(7), torch.rand(2, 8, 8), torch.randint(9, (8, 8)), torch.rand(2, 2)):
        assert picture_of(other) is None
    assert picture_of(torch.full((4, 4), torch.nan)) is None
