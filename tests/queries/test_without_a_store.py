"""Influence of data whose gradients no store has: the same products, and nothing kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)

import packprop
from packprop import Refinement
from packprop.applications.queries.candidates import AlongVectors, ReadSamples
from packprop.engine.memory import LiveBytes
from packprop.errors import BadInput, PackpropError
from packprop.extensions import EKFAC, KFLR, BatchGrad, DiagGGNExact, Projected
from tests.cases import ONE_OF_EACH, Case
from tests.queries.small import LOSS, QUERIES, SIZE, by_row, gradients, problem
from tests.queries.test_token_influence import flat, flattened, network, terms
from tests.references.running import assert_near, backward
from tests.selection import thorough

QUIET: dict[str, Any] = {"progress": False}
SMALL = 6000
"""Bytes that are enough for one query alone."""


def in_batches(x: Tensor, y: Tensor, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [*zip(x.split(size), y.split(size), strict=True)]


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensors": lambda x, y: (x, y),
    "data set": TensorDataset,
    "batches": in_batches,
    "loader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=4),
}


def of_data(given: Any, data: Any, **options: Any) -> packprop.Influence:
    model, x, y = given
    return packprop.influence(data, model, LOSS, (x[QUERIES], y[QUERIES]), **({"k": SIZE} | options))


@pytest.mark.parametrize("memory", ["500MiB", SMALL])
@pytest.mark.parametrize("form", FORMS)
def test_products_of_single_samples(form: str, memory: Any) -> None:
    model, x, y = problem()
    rows = torch.cat([*gradients((model, x, y)).values()], 1)
    found = of_data((model, x, y), FORMS[form](x, y), memory=memory, groups=y)
    assert_near(by_row(found), rows[QUERIES] @ rows.mT, "products", 1e-9)
    if form in ("tensors", "data set"):
        again = of_data((model, x, y), FORMS[form](x, y), memory=memory, batch_size=4)
        assert (again.readings, again.samples) == (found.readings, SIZE)
    assert torch.equal(found.largest.identifiers, found.largest.rows)
    assert (found.samples, found.terms, found.quantity) == (SIZE, float(SIZE), "gradients")
    assert found.readings == (1 if memory != SMALL else 3)
    assert found.groups is not None
    for group in range(3):
        assert_near(found.groups[:, group], (rows[QUERIES] @ rows[y == group].mT).sum(1), "sums", 1e-9)
    few = of_data((model, x, y), FORMS[form](x, y), k=2)
    assert torch.equal(few.largest.rows, found.largest.rows[:, :2])
    assert torch.equal(few.smallest.rows, found.smallest.rows[:, :2])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("queried", [1, 2])
def test_positions_share_weights(tied: bool, queried: int) -> None:
    """Linear layers over tokens, tables that are looked up, and the one that is also the head."""
    model, given, (words, targets) = network(tied)
    queries = words[:queried], targets[:queried]
    found = packprop.influence(given, model, flattened, queries, k=len(given[0]), batch_size=2)
    rows = flat(model, terms(model, *given)).sum(1)
    assert_near(by_row(found), flat(model, terms(model, *queries)).sum(1) @ rows.mT, "products", 1e-9)


@pytest.mark.parametrize("how", ["factors", "diagonal", "refined", "both"])
def test_as_with_a_store(how: str, tmp_path: Path) -> None:
    model, x, y = problem()
    asked = {"factors": EKFAC(fisher="exact"), "diagonal": DiagGGNExact(), "both": EKFAC(fisher="exact")}
    more = [asked[how]] if how in asked else []
    result = packprop.compute(model, LOSS, (x, y), [BatchGrad(), *more], store=tmp_path / "store", **QUIET)
    options: dict[str, Any] = {"damping": 0.1}
    if more:
        options["curvature"] = result[more[0]]
    if how in ("refined", "both"):
        options["refine"] = Refinement((x, y), tolerance=1e-10, readings=200, progress=False)
    stored = of_data((model, x, y), tmp_path / "store", **options)
    found = of_data((model, x, y), (x, y), batch_size=4, **options)
    assert_near(by_row(found), by_row(stored), "products", 1e-7)
    assert (found.curvature, found.damping) == (stored.curvature, stored.damping)


@pytest.mark.parametrize("make", [EKFAC(fisher="exact"), KFLR(), DiagGGNExact()], ids=lambda each: each.name)
def test_a_parameter_that_no_loss_depends_on_needs_no_block(make: Any, tmp_path: Path) -> None:
    """A pooler; curvature without a block that a query needs is refused where it is met."""
    model, x, y = problem()
    spared = nn.Sequential(*model)
    spared.register_module("spare", nn.Linear(2, 2).double())
    spared.forward = lambda x: model(x)  # type: ignore[method-assign]  # leaves it out
    blocks = packprop.compute(spared, LOSS, (x, y), [make], **QUIET)[make]
    asked = Projected(BatchGrad(), 16)
    packprop.compute(spared, LOSS, (x, y), [asked], store=tmp_path / "projected", **QUIET)
    for more in ({}, {"refine": Refinement((x, y), tolerance=1e-9, readings=200, width=8, progress=False)}):
        options: dict[str, Any] = {"curvature": blocks, "damping": 0.1, **more}
        expected = of_data((model, x, y), (x, y), **options)
        assert_near(by_row(of_data((spared, x, y), (x, y), **options)), by_row(expected), "products", 1e-6)
        of_data((spared, x, y), tmp_path / "projected", **options)
    lacking = {name: block for name, block in blocks.items() if name != "3.bias"}
    with pytest.raises(BadInput, match=r"'3.bias'(.|\n)*has no block in the given curvature"):
        of_data((spared, x, y), (x, y), curvature=lacking, damping=0.1)
    with pytest.raises(BadInput, match=r"'0.weight' and 5 more(.|\n)*has one for 'other'"):
        of_data((spared, x, y), (x, y), curvature={"other": torch.ones(2)}, damping=0.1, **more)


def test_a_model_that_computes_its_loss() -> None:
    model, x, y = problem()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return LOSS(self.model(x), y)

    queries = [(x[QUERIES], y[QUERIES])]
    found = packprop.influence(in_batches(x, y), Whole(), None, queries, k=SIZE)
    assert_near(by_row(found), by_row(of_data((model, x, y), (x, y))), "products", 1e-9)


def test_random_numbers_are_the_same_in_each_reading() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.Dropout(0.5), nn.Linear(40, 4)).double()
    x, y = torch.randn(6, 3).double(), torch.randint(4, (6,))
    queries = x[:1].expand(2, 3).clone(), y[:1].expand(2).clone()
    for module in model:
        module.train(isinstance(module, nn.Dropout))
    found = packprop.influence([(x, y)], model, LOSS, (queries[0][:1], queries[1][:1]), k=6)
    assert found.readings == 1
    states = []

    def noted(module: nn.Module, given: Any) -> None:
        if len(given[0]) == 6:
            states.append(torch.get_rng_state())

    model.register_forward_pre_hook(noted)
    assert packprop.influence([(x, y)], model, LOSS, queries, k=6, memory=20_000).readings == 2
    assert torch.equal(*states)


def test_readings_draw_alike_and_leave_generators_alone() -> None:
    """Those of Python, and one that the model holds."""
    model, x, y = problem()
    own = torch.Generator().manual_seed(0)

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.own = model, own

        def forward(self, x: Tensor) -> Tensor:
            if len(x) == SIZE:  # the data, which are one batch
                drawn.append((random.random(), float(torch.rand((), generator=self.own))))
            out: Tensor = self.model(x)
            return out

    drawn: list[tuple[float, float]] = []
    before = random.getstate(), own.get_state().tolist()
    assert of_data((Noisy(), x, y), [(x, y)], memory=SMALL).readings == 3
    assert len({*drawn}) == 1
    assert (random.getstate(), own.get_state().tolist()) == before


def test_nothing_is_changed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    x, y = torch.randn(6, 3), torch.randint(4, (6,))
    LOSS(model(x), y).backward()
    before = [torch.clone(p.grad) for p in model.parameters() if p.grad is not None]
    attributes = {name: {*vars(each)} for name, each in model.named_modules()}
    state = torch.get_rng_state()
    found = [packprop.influence((x, y), model, LOSS, (x[:2], y[:2]), k=6) for _ in range(2)]
    assert not torch.equal(state, torch.get_rng_state())  # the model draws, as it does in forward passes
    torch.set_rng_state(state)
    assert torch.equal(by_row(found[0]), by_row(packprop.influence((x, y), model, LOSS, (x[:2], y[:2]), k=6)))
    assert model.training
    assert attributes == {name: {*vars(each)} for name, each in model.named_modules()}
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, old)
    assert not any(name.startswith("along") for p in model.parameters() for name in vars(p))


class Turning:
    """Batches that come in another order each time."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.batches = in_batches(x, y)

    def __iter__(self) -> Iterator[Any]:
        self.batches = self.batches[1:] + self.batches[:1]
        return iter(self.batches)


def test_refusals() -> None:
    given = _, x, y = problem()
    with pytest.raises(BadInput, match="can be read once"):
        of_data(given, iter(in_batches(x, y)), memory=SMALL)
    assert of_data(given, iter(in_batches(x, y))).readings == 1
    data = TensorDataset(x, y)
    for options in (
        {"shuffle": True},
        {"sampler": SubsetRandomSampler(range(SIZE))},
        {"sampler": DistributedSampler(data, 2, 0)},
        {"sampler": type("Own", (RandomSampler,), {})(data)},
        {"sampler": type("Own", (Sampler,), {"__module__": "rich.text"})()},  # as torchdata's
        {"batch_sampler": BatchSampler(RandomSampler(data), 4, drop_last=False), "batch_size": 1},
    ):
        with pytest.raises(BadInput, match="which shuffle"):
            of_data(given, DataLoader(data, **({"batch_size": 4} | options)))
    of_data(given, DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 1, 0, shuffle=False)))
    with pytest.raises(BadInput, match="differ from those of the first reading"):
        of_data(given, Turning(x, y), memory=SMALL)
    with pytest.raises(BadInput, match="there are 9 rows, and each needs the number of its group"):
        of_data(given, (x, y), groups=[0, 1])
    with pytest.raises(BadInput, match="only a store has several kinds of gradients"):
        of_data(given, (x, y), quantity="grad_batch")
    with pytest.raises(BadInput, match="the data hold no sample"):
        of_data(given, [(x[:0], y[:0])])
    with pytest.raises(BadInput, match="which is more than its part, 10 B"):
        of_data(given, (x, y), memory=30)
    spoiled = x.clone()
    spoiled[6] = torch.nan
    with pytest.raises(PackpropError, match="query 0 and sample 6 of the data"):
        of_data(given, (spoiled, y), batch_size=4)


def test_what_a_budget_asks_for_is_enough() -> None:
    given = _, x, y = problem()
    with pytest.raises(BadInput, match="give at least") as caught:
        of_data(given, (x, y), memory=100)
    asked = str(caught.value).rpartition("give at least ")[2]
    assert of_data(given, (x, y), memory=asked.replace(" ", "")).readings == 3


@thorough
def test_groups_keep_no_products() -> None:
    """Products with all samples, of which there may be millions, would not fit into any budget."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(2, 2), torch.randn(4096, 2), torch.randint(2, (4096,))
    live = LiveBytes()
    with live:
        found = packprop.influence((x, y), model, LOSS, (x[:64], y[:64]), k=1, groups=y, memory="1MiB")
    assert found.readings == 1
    assert live.peak < 64 * 4096 * 8 / 2
    with pytest.raises(BadInput, match=r"they are for 2 rows, and each needs .* from 0 on"):
        packprop.influence((x, y), model, LOSS, (x[:64], y[:64]), groups=[-1, 0])


def test_refined_work_goes_on_where_it_was_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of queries that are done are not searched again; other data are refused."""
    given = _, x, y = problem()
    memory = 9_000

    def refined(data: Any) -> packprop.Influence:
        refine = Refinement((x, y), readings=200, tolerance=1e-9, checkpoint=tmp_path / "kept", **QUIET)
        return of_data(given, data, refine=refine, damping=0.1, memory=memory)

    find, done = ReadSamples.find, list[int]()

    def stopping(self: ReadSamples, rows: dict[str, Tensor]) -> Any:
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(len(rows))
        return find(self, rows)

    monkeypatch.setattr(ReadSamples, "find", stopping)
    with pytest.raises(KeyboardInterrupt):
        refined((x, y))
    monkeypatch.setattr(ReadSamples, "find", find)
    with pytest.raises(BadInput, match="it belongs to something else"):
        refined((x + 1, y))
    again = refined((x, y))
    monkeypatch.setattr(ReadSamples, "find", None)  # everything is there
    known = refined((x, y))
    assert (known.samples, known.terms) == (again.samples, again.terms) == (SIZE, float(SIZE))
    assert torch.equal(known.largest.products, again.largest.products)
    monkeypatch.setattr(ReadSamples, "find", find)
    whole = of_data(
        given, (x, y), refine=Refinement((x, y), readings=200, tolerance=1e-9, **QUIET), damping=0.1
    )
    assert_near(by_row(again), by_row(whole), "products", 1e-6)


@pytest.mark.parametrize("vectors", [1, 3])
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case.name)
def test_products_of_every_function(case: Case, vectors: int) -> None:
    """As those of the rows themselves, however the function meets its parameter."""
    torch.manual_seed(1)
    given = case.problem(case.sizes[-1], "sum" if "sum" in case.reductions else case.reductions[0])
    along = {name: torch.randn(vectors, *p.shape, dtype=p.dtype) for name, p in given.parameters.items()}
    backward(given, BatchGrad(), AlongVectors(along), record=case.record)
    for name, parameter in given.parameters.items():
        if hasattr(parameter, "grad_batch"):
            expected = parameter.grad_batch.flatten(1) @ along[name].flatten(1).mT
            assert_near(parameter.along_vectors, expected, name, 1e-9)
