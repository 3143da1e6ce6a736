"""Influence split by tokens: each entry by a loop over terms, sums as influence has them, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import Refinement
from packprop.errors import BadInput, PackpropError
from packprop.extensions import EKFAC, BatchGrad, DiagGGNExact
from tests.queries.small import problem
from tests.references.running import assert_near
from tests.references.tokens import CLASSES, SAMPLES, TOKENS, Language, class_axis, data, flattened

QUIET: dict[str, Any] = {"progress": False}


def network(tied: bool = False) -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A language model, its data, in which some tokens do not count, and two queries."""
    torch.manual_seed(0)
    model = Language(tied).double()
    words, targets, _ = data()
    queries = torch.randint(CLASSES, (2, TOKENS)), torch.randint(CLASSES, (2, TOKENS))
    return model, (words, targets), queries


def flat(model: nn.Module, terms: Tensor) -> Tensor:
    """The gradient of each term ``[*terms, p]``, one after the other."""
    rows = [torch.autograd.grad(term, [*model.parameters()], retain_graph=True) for term in terms.flatten()]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows]).unflatten(0, terms.shape)


def terms(model: nn.Module, words: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(words).mT, targets, reduction="none")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("loss", [flattened, class_axis])
@pytest.mark.parametrize("batch_size", [2, 128])
def test_each_token_by_itself(tied: bool, loss: Any, batch_size: int) -> None:
    model, given, queries = network(tied)
    found = packprop.token_influence(model, loss, given, queries, batch_size=batch_size)
    expected = torch.einsum(
        "ntp,qp->qnt", flat(model, terms(model, *given)), flat(model, terms(model, *queries)).sum(1)
    )
    assert found.shape == (2, SAMPLES, TOKENS)
    assert_near(found, expected, "products", 1e-9)
    assert (found[:, 1, 2:] == 0).all()


@pytest.mark.parametrize("how", ["nothing", "factors", "diagonal", "refined"])
def test_sums_over_tokens_are_products(how: str, tmp_path: Path) -> None:
    model, given, queries = network()
    asked = {"factors": [EKFAC(fisher="exact")], "diagonal": [DiagGGNExact()]}.get(how, [])
    store = tmp_path / "store"
    result = packprop.compute(model, flattened, given, [BatchGrad(), *asked], store=store, **QUIET)
    options: dict[str, Any] = {}
    if asked:
        options = {"curvature": result[asked[0]], "damping": 0.1}
    if how == "refined":
        options = {"refine": Refinement(given, progress=False, tolerance=1e-10, readings=200), "damping": 0.1}
    tokens = packprop.token_influence(model, flattened, given, queries, **options)
    found = packprop.influence(store, model, flattened, queries, k=SAMPLES, **options)
    products = torch.empty_like(found.largest.products).scatter(1, found.largest.rows, found.largest.products)
    assert_near(tokens.sum(2), products.to(tokens.dtype), "sums", 1e-7)


def twice(scores: Tensor, targets: Tensor) -> Tensor:
    """Two losses, of which one takes what the other one's input leads to."""
    scores = scores.mT
    chances = scores.log_softmax(1)
    smooth = torch.full_like(chances, 1 / CLASSES)
    return F.cross_entropy(scores, targets, reduction="sum") + F.kl_div(chances, smooth, reduction="sum")


def test_a_loss_whose_input_leads_to_another_one(tmp_path: Path) -> None:
    model, given, queries = network()
    store = tmp_path / "store"
    packprop.compute(model, twice, given, [BatchGrad()], store=store, **QUIET)
    found = packprop.influence(store, model, twice, queries, k=SAMPLES)
    products = torch.empty_like(found.largest.products).scatter(1, found.largest.rows, found.largest.products)
    tokens = packprop.token_influence(model, twice, given, queries)
    assert_near(tokens.sum(2), products, "sums", 1e-9)


def consistent(scores: Tensor, targets: Tensor) -> Tensor:
    """A loss whose target is made of the model's output, too."""
    return F.mse_loss(scores, scores.flip(1))


def test_a_target_that_requires_gradients_is_refused() -> None:
    model, given, queries = network()
    with pytest.raises(
        PackpropError,
        match="it requires gradients, as the model's output does, and it is not known which tokens",
    ):
        packprop.token_influence(model, consistent, given, queries)
    packprop.extend(model)
    with packprop.backpack(BatchGrad(per="token")), packprop.record():
        scores = model(given[0])
        loss = F.mse_loss(scores, target=scores.flip(1).detach())
        loss.backward()
    sums = model.hidden.weight.grad_batch_token.sum((0, 1))
    assert_near(sums, model.hidden.weight.grad, "sums", 1e-9)
    with (
        pytest.raises(PackpropError, match="argument 1 of mse_loss"),
        packprop.backpack(BatchGrad(per="token")),
        packprop.record(),
    ):
        scores = model(given[0])
        F.mse_loss(scores, target=scores.flip(1)).backward()


def by_hand(scores: Tensor, targets: Tensor) -> Tensor:
    return class_axis(scores, targets) / len(targets)


def several_means(scores: Tensor, targets: Tensor) -> Tensor:
    return flattened(scores, targets) + 0.1 * F.mse_loss(scores, torch.zeros_like(scores))


def test_scales_that_differ_between_batches_are_refused(tmp_path: Path) -> None:
    model, given, queries = network()
    with pytest.raises(PackpropError, match="it multiplies the loss by"):
        packprop.token_influence(model, by_hand, given, queries, batch_size=2)
    with pytest.raises(PackpropError, match="some samples count more than others"):
        packprop.token_influence(model, several_means, given, queries)
    store = tmp_path / "store"
    packprop.compute(model, by_hand, given, [BatchGrad()], store=store, **QUIET)
    three = tuple(torch.cat([each, each[:1]]) for each in queries)
    with pytest.raises(PackpropError, match="it multiplies the loss by"):
        packprop.influence(store, model, by_hand, three, batch_size=2)


def test_a_refused_call_leaves_buffers_alone(tmp_path: Path) -> None:
    x, y = torch.randn(4, 3, 5), torch.randn(4, 3, 2)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(3), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PackpropError, match="batch normalisation in training mode"):
        packprop.token_influence(model, nn.MSELoss(), (x, y), (x, y))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_model_stays_as_it_is() -> None:
    model, given, queries = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    packprop.token_influence(model, flattened, given, queries)
    assert all(p.grad is None and not vars(p) for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_bad_input(tmp_path: Path) -> None:
    model, (words, targets), queries = network()
    batches = [(words[:1], targets[:1]), (words[1:, :3], targets[1:, :3])]

    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(CLASSES, CLASSES).double()

        def forward(self, words: Tensor) -> Tensor:
            found: Tensor = self.table(words)
            return found

    with pytest.raises(BadInput, match="its samples have 3, 4 tokens"):
        packprop.token_influence(Short(), flattened, batches, queries)
    with pytest.raises(BadInput, match="the data hold no sample"):
        packprop.token_influence(model, flattened, [(words[:0], targets[:0])], queries)
    with pytest.raises(BadInput, match="the data hold no sample"):
        packprop.token_influence(model, flattened, (words, targets), [(words[:0], targets[:0])])
    with pytest.raises(BadInput, match="give fewer queries"):
        packprop.token_influence(model, flattened, (words, targets), queries, memory=1000)
    with pytest.raises(BadInput, match="there is no matrix that they belong to"):
        packprop.token_influence(model, flattened, (words, targets), queries, damping=0.1)
    refinement = Refinement((words, targets), checkpoint=tmp_path)
    with pytest.raises(BadInput, match="the folder belongs to a search in a store"):
        packprop.token_influence(model, flattened, (words, targets), queries, damping=0.1, refine=refinement)
    for wrong in (0, -1, 1.5):
        with pytest.raises(BadInput, match="it is no number of samples"):
            packprop.token_influence(model, flattened, (words, targets), queries, batch_size=wrong)  # type: ignore[arg-type]  # the point of it
    words_of_one = Short()
    words_of_one.table.weight.data.fill_(torch.nan)
    with pytest.raises(PackpropError, match="not finite"):
        packprop.token_influence(words_of_one, flattened, (words, targets), queries)
    images, x, y = problem()
    with pytest.raises(PackpropError, match="it has one term for each sample"):
        packprop.token_influence(images, nn.CrossEntropyLoss(), (x, y), (x[:1], y[:1]))
