"""Documents packed into rows, as samples: against the same documents in rows of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.errors import BadInput, PackpropError
from tests.cases.models.wrapping import Apply
from tests.references.running import assert_near
from tests.selection import one_in

WIDTH, WORDS, LONGEST, IGNORED = 6, 7, 4, -100
LENGTHS = [3, 1, 4, 2, 2, 4]
"""Of documents 0 to 5."""


class Packed(nn.Module):
    """A causal transformer of one block that is told which document each position belongs to."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.projections, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.hidden, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=not tied)
        self.leaks, self.fused = False, not tied
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor, places: Tensor, documents: Tensor) -> Tensor:
        x = self.embedding(words) + self.places(places)
        query, key, value = self.projections(self.norm(x)).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)
        mask = torch.ones(words.shape[1], words.shape[1]).tril().bool()
        if not self.leaks:
            mask = mask & (documents[:, :, None] == documents[:, None, :])[:, None]
        if self.fused:
            attended = F.scaled_dot_product_attention(query, key, value, mask)
        else:  # a first position sees itself alone: its query has no gradient, which tells no document
            scores = query @ key.mT / query.shape[-1] ** 0.5
            attended = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1) @ value
        attended = attended.transpose(1, 2).flatten(2)
        out: Tensor = self.head(x + self.scale * torch.tanh(self.hidden(attended)))
        return out


def texts() -> list[tuple[Tensor, Tensor]]:
    """Words and targets of each document; one target is ignored."""
    generator = torch.Generator().manual_seed(3)
    each = [torch.randint(WORDS, (2, length), generator=generator) for length in LENGTHS]
    each[2][1, 1] = IGNORED
    return [(words, targets) for words, targets in each]


def packed(rows: list[list[int]]) -> tuple[Tensor, ...]:
    """Words, places, documents and targets of documents that are packed into some rows ``[n, t]``."""
    known = texts()
    columns = []
    for row in rows:
        words, targets = (torch.cat(parts) for parts in zip(*(known[each] for each in row), strict=True))
        places = torch.cat([torch.arange(LENGTHS[each]) for each in row])
        documents = torch.cat([torch.full((LENGTHS[each],), each) for each in row])
        columns.append((words, places, documents, targets))
    return tuple(torch.stack(column) for column in zip(*columns, strict=True))


def apart() -> tuple[Tensor, ...]:
    """The same documents, each in a row of its own, filled up."""
    size, known = len(LENGTHS), texts()
    words, targets = torch.zeros(size, LONGEST).long(), torch.full((size, LONGEST), IGNORED)
    for number, (own_words, own_targets) in enumerate(known):
        words[number, : LENGTHS[number]], targets[number, : LENGTHS[number]] = own_words, own_targets
    return words, torch.arange(LONGEST).expand(size, -1), torch.zeros(size, LONGEST), targets


def flattened(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def class_axis(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.mT, targets, reduction="sum")


def own_sum(scores: Tensor, targets: Tensor) -> Tensor:
    return 0.3 * F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none").sum()


def regression(scores: Tensor, targets: Tensor) -> Tensor:
    """The sum of squares, without positions that are ignored."""
    counted = (targets != IGNORED)[..., None]
    return F.mse_loss(scores * counted, torch.zeros_like(scores), reduction="sum")


def run(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    batch: tuple[Tensor, ...],
    *asked: Any,
    **options: Any,
) -> None:
    *inputs, targets = batch
    model.zero_grad()
    with packprop.backpack(*asked), packprop.record(**options):
        loss(model(*inputs), targets).backward()


ASKED = (
    extensions.BatchGrad,
    extensions.BatchL2Grad,
    extensions.SumGradSquared,
    extensions.Variance,
    extensions.BatchDotGrad,
    extensions.DiagGGNExact,
    extensions.BatchDiagGGNExact,
)
ONE_ROW, ROWS = [[0, 1, 2, 3, 4, 5]], [[4, 3, 5], [0, 1, 2]]  # documents need not be in order


@one_in(3)
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize(
    ("rows", "loss"),
    [(ONE_ROW, flattened), (ONE_ROW, class_axis), (ROWS, flattened), (ROWS, own_sum), (ROWS, regression)],
    ids=["one row", "one row, class axis", "flattened", "own sum", "regression"],
)
def test_against_rows_of_their_own(loss: Any, rows: list[list[int]], tied: bool) -> None:
    torch.manual_seed(0)
    model = packprop.extend(Packed(tied).double())
    known: dict[tuple[str, str], Tensor] = {}
    asked = [kind() for kind in ASKED]
    run(model, loss, apart(), *asked)
    for name, parameter in model.named_parameters():
        known |= {(name, each.savefield): getattr(parameter, each.savefield) for each in asked}
    batch = packed(rows)
    run(model, loss, batch, *asked, documents=batch[2])
    for (name, field), value in known.items():
        found = getattr(dict(model.named_parameters())[name], field)
        assert found.shape == value.shape
        assert_near(found, value, f"{name}.{field}", floor=1e-6)


class Odd(nn.Module):
    """Parameters that meet positions in other ways: along the row, by an equation, by the fallback."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.along = nn.Parameter(torch.randn(length, WIDTH))
        self.equation = nn.Parameter(torch.randn(2, WIDTH, 3))
        self.bend = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(3, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = F.one_hot(words, WIDTH + 1)[..., :WIDTH].to(self.along) + self.along
        x = torch.einsum("ntd,hdk->nthk", x.tanh(), self.equation).sum(2)
        scores: Tensor = self.head(torch.hypot(x, self.bend))
        return scores


@pytest.mark.parametrize("rows", [ONE_ROW, ROWS], ids=["one row", "two rows"])
def test_parameters_of_all_kinds_against_loops(rows: list[list[int]]) -> None:
    torch.manual_seed(0)
    words, _, documents, targets = packed(rows)
    model = packprop.extend(Odd(words.shape[1]).double())
    asked = extensions.BatchGrad(), extensions.DiagGGNExact(), extensions.DiagHessian()
    run(model, flattened, (words, targets), *asked, documents=documents)
    with packprop.disable():
        terms = F.cross_entropy(model(words).flatten(0, 1), targets.flatten(), reduction="none")
        terms = terms / (targets != IGNORED).sum().double()
    for name, parameter in model.named_parameters():
        known = [
            torch.autograd.grad(terms[documents.flatten() == each].sum(), parameter, retain_graph=True)[0]
            for each in range(len(LENGTHS))
        ]
        assert_near(parameter.grad_batch, torch.stack(known), name)
    found = {name: (p.diag_ggn_exact, p.diag_h) for name, p in model.named_parameters()}
    run(model, flattened, (words, targets), *asked)  # sums over samples are the same for rows
    for name, parameter in model.named_parameters():
        assert_near(found[name][0], parameter.diag_ggn_exact, name)
        assert_near(found[name][1], parameter.diag_h, name)


def test_further_extensions() -> None:
    torch.manual_seed(0)
    model = packprop.extend(Packed(tied=True).double())
    kinds = [
        extensions.BatchDiagHessian(),
        extensions.KFLR(),
        extensions.BatchGrad(per="token"),
        extensions.BatchDiagGGNExact(per="token"),
        extensions.BatchJacobian(),
        extensions.SqrtGGNExact(),
        extensions.BatchGrad(subsampling=[4, 1]),
    ]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        run(model, flattened, apart(), *kinds)
        fields = [each.savefield for each in kinds if each.savefield != "kflr"]
        known = {(n, f): getattr(p, f) for n, p in model.named_parameters() for f in fields}
        factors = {n: p.kflr[0] for n, p in model.named_parameters()}
        batch = packed(ROWS)
        run(model, flattened, batch, *kinds, documents=batch[2])
    for name, parameter in model.named_parameters():
        if (
            parameter.kflr[0].shape == factors[name].shape
        ):  # a table has its whole block where rows are filled up
            assert_near(parameter.kflr[0], factors[name], f"{name}, kflr", floor=1e-6)
        else:
            assert name in ("embedding.weight", "places.weight")
        for field in fields:
            value, found = known[name, field], getattr(parameter, field)
            if field == "jac_batch":  # behind the end of a document there are zeros, not what is filled up
                size = torch.tensor(LENGTHS)[:, None] > torch.arange(LONGEST)
                value = value * size.repeat_interleave(WORDS, 1).view(len(LENGTHS), -1, *[1] * parameter.dim())
            assert_near(found, value, f"{name}.{field}", floor=1e-6)


def test_a_document_in_several_rows_and_one_document() -> None:
    torch.manual_seed(0)
    model = packprop.extend(Packed().double())
    batch = packed(ROWS)
    run(model, flattened, batch, extensions.BatchGrad(), documents=batch[2])
    known = model.hidden.weight.grad_batch
    run(model, flattened, batch, extensions.BatchGrad(), documents=batch[2] % 2)
    assert_near(model.hidden.weight.grad_batch, torch.stack([known[::2].sum(0), known[1::2].sum(0)]), "hidden")
    run(model, flattened, batch, extensions.BatchGrad(), documents=torch.zeros_like(batch[2]))
    assert_near(model.hidden.weight.grad_batch, known.sum(0, keepdim=True), "hidden")


def test_each_pass_has_documents_of_its_own() -> None:
    torch.manual_seed(0)
    model = packprop.extend(Packed().double())
    batch = packed(ONE_ROW)
    first = torch.empty(0)
    for documents in (batch[2], None, 5 - batch[2], None):
        options = {} if documents is None else {"documents": documents}
        run(model, flattened, batch, extensions.BatchGrad(), **options)
        grads = model.hidden.weight.grad_batch
        assert len(grads) == (1 if documents is None else len(LENGTHS))
        assert_near(grads.sum(0), model.hidden.weight.grad, "hidden.weight")
        if documents is not None:
            own = grads if documents is batch[2] else grads.flip(0)
            first = own if documents is batch[2] else first
            assert_near(own, first, "hidden.weight")


def test_a_head_in_pieces() -> None:
    torch.manual_seed(0)
    model = packprop.extend(Packed().double())
    *inputs, documents, targets = batch = packed(ROWS)
    run(model, own_sum, batch, extensions.BatchGrad(), documents=documents)
    known = model.hidden.weight.grad_batch
    with packprop.backpack(extensions.BatchGrad()), packprop.record():
        scores = model(*inputs, documents).flatten(0, 1)
        total = scores.new_zeros(())
        pieces = zip(scores.split(5), targets.flatten().split(5), documents.flatten().split(5), strict=True)
        for own_scores, own_targets, own_documents in pieces:
            with packprop.record(documents=own_documents):
                total = total + 0.3 * F.cross_entropy(own_scores, own_targets, reduction="sum")
        total.backward()
    assert_near(model.hidden.weight.grad_batch, known, "hidden.weight")


def test_documents_that_meet_are_refused() -> None:
    torch.manual_seed(0)
    model = packprop.extend(Packed().double())
    for rows in (ONE_ROW, ROWS):
        batch = packed(rows)
        model.leaks = False
        run(model, flattened, batch, extensions.BatchGrad(), documents=batch[2])
        model.leaks = True
        with pytest.raises(PackpropError, match="documents meet there"):
            run(model, flattened, batch, extensions.BatchGrad(), documents=batch[2])
        moved = batch[2].roll(1, -1)  # what is declared is not what the mask keeps apart
        model.leaks = False
        with pytest.raises(PackpropError, match="documents meet there"):
            run(model, flattened, batch, extensions.BatchGrad(), documents=moved)


@pytest.mark.parametrize("layer", [nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Conv1d(8, 8, 3, padding=1)])
def test_layers_that_run_over_the_row_are_refused(layer: nn.Module) -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer, self.head = nn.Embedding(WORDS, WIDTH), layer, nn.Linear(WIDTH, WORDS)

        def forward(self, words: Tensor) -> Tensor:
            hidden = self.layer(self.embedding(words))
            scores: Tensor = self.head(hidden[0] if isinstance(hidden, tuple) else hidden)
            return scores

    model = packprop.extend(Running())
    words, _, documents, targets = packed(ROWS)
    with pytest.raises(PackpropError, match="documents meet there"):
        run(model, flattened, (words, targets), extensions.BatchGrad(), documents=documents)


def test_declarations_that_do_not_fit() -> None:
    torch.manual_seed(0)
    model = packprop.extend(Packed())
    batch = packed(ROWS)
    refused = [
        (batch[2][:, :-1], flattened, "one number for each position"),
        (batch[2] - 1, flattened, "negative number"),
        (batch[2] * 10**9, flattened, "the largest number"),
        (batch[2], class_axis, "not adjacent"),
        (batch[2], lambda s, y: flattened(s, y) + s.square().sum(), "declared for another loss"),
    ]
    for documents, loss, why in refused:
        with pytest.raises(PackpropError, match=why):
            run(model, loss, batch, extensions.BatchGrad(), documents=documents)
    for documents in (batch[2].double(), batch[2].tolist(), batch[2][..., None]):
        with pytest.raises(BadInput, match="no tensor of whole numbers"):
            run(model, flattened, batch, extensions.BatchGrad(), documents=documents)
    with packprop.record(documents=batch[2]):
        loss = flattened(model(*batch[:3]), batch[3])
    with (
        pytest.raises(PackpropError, match="A plan was asked for"),
        packprop.backpack(extensions.BatchGrad(), memory="1GiB"),
    ):
        loss.backward()


def test_rows_of_one_document_may_be_those_of_two_in_the_next_pass() -> None:
    """A gate of zero mixes pairs of rows: what was right for pairs is refused for rows."""
    torch.manual_seed(0)

    def paired(m: Any, x: Tensor) -> Tensor:
        h = m.first(x).tanh()
        other = torch.stack([h[1::2], h[0::2]], 1).flatten(0, 1)
        return m.head(h + m.gate * other)  # type: ignore[no-any-return]  # a module

    model: Any = Apply(paired, first=nn.Linear(3, 3), head=nn.Linear(3, 2))
    model.gate = nn.Parameter(torch.zeros(()))
    packprop.extend(model.double())
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    for documents in ([0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 2, 3]):
        with packprop.record(documents=torch.tensor(documents)):
            loss = F.mse_loss(model(x), y, reduction="sum")
        if documents[1] == 0:
            with packprop.backpack(extensions.BatchGrad()):
                loss.backward()
            halves = [F.mse_loss(model(x[rows]), y[rows], reduction="sum") for rows in ([0, 1], [2, 3])]
            expected = torch.stack([torch.autograd.grad(each, model.gate)[0] for each in halves])
            assert_near(model.gate.grad_batch, expected, "rows")
        else:
            with pytest.raises(PackpropError, match="gate"), packprop.backpack(extensions.BatchGrad()):
                loss.backward()
