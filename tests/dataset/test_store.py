"""`compute(..., store=...)`: rows on disk are those that would have been in the result."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import Store, StoreWriter, extensions
from packprop.applications.dataset.checkpoint import Checkpoint
from packprop.applications.dataset.run import Run
from packprop.errors import BadInput, PackpropError
from tests.dataset.small import SIZE, compute, part, small
from tests.references.running import as_tensors, assert_near

GROWING = [
    extensions.BatchGrad,
    extensions.BatchL2Grad,
    extensions.BatchDiagGGNExact,
    extensions.SqrtGGNExact,
    extensions.BatchJacobian,
    extensions.BatchDiagHessian,
]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_rows_on_disk_are_those_of_the_result(tmp_path: Path, reduction: str) -> None:
    model, (x, y) = small()
    data = [(part(x, *cut), part(y, *cut)) for cut in [(0, 3), (3, 4), (4, SIZE)]]
    loss = nn.CrossEntropyLoss(reduction=reduction, weight=torch.tensor([1.0, 3.0]).double())
    asked = [make() for make in GROWING] + [extensions.Variance(), extensions.KFLR()]
    inside = compute(model, loss, data, *asked)
    found = compute(model, loss, data, *asked, store=tmp_path / "store")
    store = Store(tmp_path / "store")
    assert (store.samples, store.finished, found.samples) == (SIZE, True, SIZE)
    assert found.loss == inside.loss
    assert list(found) == ["variance", "kflr"]
    for kept in found:
        for name, value in found[kept].items():
            assert all(map(torch.equal, as_tensors(value), as_tensors(inside[kept][name])))
    scale = 1 / store.terms if reduction == "mean" else 1.0
    for extension in asked[: len(GROWING)]:
        arrays = store[extension.savefield]
        assert arrays.keys() == inside[extension].keys()
        for name, value in inside[extension].items():
            assert isinstance(value, Tensor)
            rows = arrays[name].torch() * scale ** arrays[name].header.degree
            assert_near(rows, value.movedim(extension.sample_axis, 0), f"{extension.name} of {name}")


def test_a_writer_of_ones_own(tmp_path: Path) -> None:
    """It is left open, takes what it was opened for, and is told who the samples are."""
    model, (x, y) = small()
    order = torch.randperm(SIZE)
    asked = extensions.BatchGrad(), extensions.BatchL2Grad()
    writer = StoreWriter(
        tmp_path / "store", model, asked[:1], dtype=torch.bfloat16, identify=lambda batch: batch[0][:, 0].long()
    )
    x = torch.cat([order[:, None].double(), x[:, 1:]], 1)
    with writer:
        first = compute(model, nn.CrossEntropyLoss(), (x, y), *asked, batch_size=3, store=writer)
        assert list(first) == ["batch_l2"]
        assert list(compute(model, nn.CrossEntropyLoss(), (x, y), asked[0], store=writer)) == []
    store = Store(tmp_path / "store")
    assert store.identifiers.tolist() == order.tolist() * 2
    gradients = store["grad_batch", "0.weight"].torch()
    expected = compute(model, nn.CrossEntropyLoss(reduction="sum"), (x, y), asked[0])[asked[0]]["0.weight"]
    assert isinstance(expected, Tensor)
    assert torch.equal(gradients, expected.repeat(2, 1, 1).bfloat16())


class Branches(nn.Module):
    """Its second layer is used by batches of more than two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x)
        return out + self.second(x) if len(x) > 2 else out


def test_parameters_that_some_batches_do_not_use(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Branches().double()
    x, y = torch.randn(7, 3).double(), torch.randint(2, (7,))
    data = list(zip(x.split([2, 3, 2]), y.split([2, 3, 2]), strict=True))
    loss, asked = nn.CrossEntropyLoss(), extensions.BatchGrad()
    with pytest.raises(PackpropError, match="which of its rows belongs to which sample"):
        compute(model, loss, data, asked)
    compute(model, loss, data, asked, store=tmp_path / "store")
    store = Store(tmp_path / "store")
    for start, (inputs, targets) in zip((0, 2, 5), data, strict=True):
        packprop.extend(model)
        total = nn.functional.cross_entropy(model(inputs), targets, reduction="sum")
        with packprop.backpack(asked):
            total.backward()
        for name, parameter in model.named_parameters():
            rows = store["grad_batch", name][start : start + len(inputs)]
            expected = vars(parameter).pop("grad_batch", torch.zeros_like(rows))
            assert_near(rows, expected, name)


def test_samples_whose_targets_are_all_ignored(tmp_path: Path) -> None:
    model, (x, y) = small()
    y[:3] = -100
    compute(
        model, nn.CrossEntropyLoss(), (x, y), extensions.BatchGrad(), batch_size=3, store=tmp_path / "store"
    )
    store = Store(tmp_path / "store")
    assert store.terms == 4
    assert store["grad_batch", "0.bias"].torch()[:3].count_nonzero() == 0
    assert store["grad_batch", "0.bias"].torch()[3:].count_nonzero() > 0


def test_batches_before_an_error_are_kept(tmp_path: Path) -> None:
    model, (x, y) = small()
    data = [(x[:3], y[:3]), (x[3:5], y[3:5]), (x[5:, :1], y[5:])]
    with pytest.raises(BadInput, match="batch 3"):
        compute(model, nn.CrossEntropyLoss(), data, extensions.BatchGrad(), store=tmp_path / "store")
    store = Store(tmp_path / "store")
    assert (store.samples, store.finished) == (5, False)


@pytest.mark.parametrize(
    ("asked", "opened", "words"),
    [
        ([extensions.Variance()], None, "none of these values grows"),
        (
            [extensions.BatchGrad()],
            [extensions.BatchL2Grad()],
            "opened for BatchL2Grad, which this call does not compute",
        ),
        ([extensions.BatchGrad()], [extensions.BatchGrad(per="token")], "opened for BatchGrad"),
    ],
    ids=["sums", "other", "options"],
)
def test_stores_for_something_else(tmp_path: Path, asked: Any, opened: Any, words: str) -> None:
    model, data = small()
    store = tmp_path / "store" if opened is None else StoreWriter(tmp_path / "store", model, opened)
    with pytest.raises(BadInput, match=words):
        compute(model, nn.CrossEntropyLoss(), data, *asked, store=store)


def test_a_store_in_the_way_is_refused_before_any_work(tmp_path: Path) -> None:
    model, data = small()
    (tmp_path / "mine").touch()
    model.register_forward_pre_hook(lambda *_: pytest.fail("work was done"))
    with pytest.raises(BadInput, match="not empty"):
        compute(model, nn.CrossEntropyLoss(), data, extensions.BatchGrad(), store=tmp_path)


@pytest.mark.parametrize("where", ["header", "first checkpoint", "unmarked rows"])
def test_an_unfinished_beginning_is_begun_anew(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill before anything is safe: the same call goes on; what lies there is not in the way."""
    model, (x, y) = small()
    calls = 0

    def killed(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2 or where != "unmarked rows":
            raise KeyboardInterrupt

    def run(**options: Any) -> Store:
        given = nn.CrossEntropyLoss(), (x, y), extensions.BatchGrad()
        compute(model, *given, batch_size=3, store=tmp_path / "store", **options)
        return Store(tmp_path / "store")

    options = {} if where == "unmarked rows" else {"checkpoint": tmp_path / "kept"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreWriter, "__exit__", lambda self, *_: self._leave())  # a kill finishes no chunk
        if where == "unmarked rows":
            model.register_forward_pre_hook(killed)
        elif where == "header":
            patch.setattr(Run, "_look_at_first", killed)
        else:
            patch.setattr(Checkpoint, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            run(**options)
    assert (tmp_path / "store" / "shard-00000" / "header.json").exists()
    with pytest.raises(BadInput, match="other extensions"):
        compute(model, nn.CrossEntropyLoss(), (x, y), extensions.BatchL2Grad(), store=tmp_path / "store")
    found = run(**options)
    assert (found.samples, found.finished) == (SIZE, True)
    expected = compute(model, nn.CrossEntropyLoss(reduction="sum"), (x, y), extensions.BatchGrad())
    for name, array in found["grad_batch"].items():
        assert_near(array.torch(), expected["grad_batch"][name], name)


def test_a_store_of_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    """Marked rows are not thrown away: the call is refused, and each way out leads somewhere."""
    model, (x, y) = small()
    folder = tmp_path / "store"

    def run(data: Any, store: Any = folder) -> Store:
        compute(model, nn.CrossEntropyLoss(), data, extensions.BatchGrad(), batch_size=3, store=store)
        return Store(store.folder if isinstance(store, StoreWriter) else store)

    class Ending(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, index: int) -> Any:
            if index == 4:
                raise KeyboardInterrupt
            return x[index], y[index]

    with pytest.raises(KeyboardInterrupt):
        run(Ending())
    with pytest.raises(BadInput, match="it holds shard 0 of a store, with 3 samples") as raised:
        run((x, y))
    for advice in ("another folder", "delete this", "resume=True"):
        assert advice in raised.value.instead
    assert run((x, y), tmp_path / "another").finished
    with StoreWriter(folder, model, [extensions.BatchGrad()], resume=True) as writer:
        assert run((x[3:], y[3:]), writer).samples == 3  # until it is closed
    assert (Store(folder).samples, Store(folder).finished) == (SIZE, True)
    shutil.rmtree(folder)
    assert run((x, y)).finished


@pytest.mark.parametrize("kind", ["rademacher", "gaussian", "kronecker"])
def test_projections_of_whole_gradients(tmp_path: Path, kind: Any) -> None:
    """What is stored is the sum over parameters, by hand too; inner products are near those of gradients."""
    model, (x, y) = small()
    asked = extensions.Projected(extensions.BatchGrad(), 2048, kind=kind, seed=2)
    loss = nn.CrossEntropyLoss()
    compute(model, loss, (x, y), asked, batch_size=3, store=tmp_path / "store")
    array = Store(tmp_path / "store")["grad_batch_projected"]
    assert array.header.projection == {"kind": kind, "dimension": 2048, "seed": 2}
    gradients = compute(model, nn.CrossEntropyLoss(reduction="sum"), (x, y), extensions.BatchGrad())[
        "grad_batch"
    ]
    expected = torch.zeros(SIZE, 2048).double()
    for name, rows in gradients.items():
        assert isinstance(rows, Tensor)
        made = asked.matrix(name, rows.shape[1:], torch.float64)
        expected += rows.flatten(1) @ made.flatten(1).T
    assert_near(array.torch(), expected, kind)
    flat = torch.cat([rows.flatten(1) for rows in gradients.values() if isinstance(rows, Tensor)], 1)
    exact, found = flat @ flat.T, expected @ expected.T
    assert (found - exact).abs().max() < (0.5 if kind == "kronecker" else 0.15) * exact.diagonal().max()
    packprop.extend(model)
    with StoreWriter(tmp_path / "hand", model, [asked]) as writer:
        for inputs, targets in zip(x.split(4), y.split(4), strict=True):
            with packprop.record():
                value = loss(model(inputs), targets)
            with packprop.backpack(asked):
                value.backward()
            writer.write(terms=len(inputs))
    assert_near(Store(tmp_path / "hand")["grad_batch_projected"].torch(), expected, "by hand")


def test_parameters_that_are_frozen_meanwhile_are_refused(tmp_path: Path) -> None:
    """Their rows would be zeros, as those of parameters that a batch does not use."""
    model, (x, y) = small()
    with packprop.StoreWriter(tmp_path / "store", model, [extensions.BatchGrad()]) as writer:
        options: dict[str, Any] = {"store": writer, "progress": False}
        packprop.compute(model, nn.CrossEntropyLoss(), (x, y), writer.extensions, **options)
        first = next(model.parameters()).requires_grad_(False)
        with pytest.raises(BadInput, match="it required gradients when the store was opened, and does not now"):
            packprop.compute(model, nn.CrossEntropyLoss(), (x, y), writer.extensions, **options)
        with packprop.record(), packprop.backpack(extensions.BatchGrad()):
            nn.functional.cross_entropy(model(x), y).backward()
        with pytest.raises(BadInput, match="and does not now"):
            writer.write(terms=len(x))
        first.requires_grad_(True)
        packprop.compute(model, nn.CrossEntropyLoss(), (x, y), writer.extensions, **options)
    assert packprop.Store(tmp_path / "store").samples == 2 * len(x)


def test_samples_are_identified_by_what_the_data_yield(tmp_path: Path) -> None:
    model, (x, y) = small()
    batches = [
        {"input": x[:3], "labels": y[:3], "id": [7, 8, 9]},
        {"input": x[3:], "labels": y[3:], "id": range(len(x) - 3)},
    ]

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input: Tensor, id: Any) -> Tensor:
            out: Tensor = self.model(input)
            return out

    named = Named()
    for folder, identify in (("store", lambda batch: batch["id"]), ("other", lambda batch: batch[0]["id"])):
        with packprop.StoreWriter(
            tmp_path / folder, named, [extensions.BatchL2Grad()], identify=identify
        ) as writer:
            options: dict[str, Any] = {"store": writer, "progress": False}
            if folder == "other":
                with pytest.raises(BadInput, match=r"StoreWriter\(identify=...\), with a batch of type dict"):
                    packprop.compute(named, nn.CrossEntropyLoss(), batches, writer.extensions, **options)
            else:
                packprop.compute(named, nn.CrossEntropyLoss(), batches, writer.extensions, **options)
    assert packprop.Store(tmp_path / "store").identifiers.tolist() == [7, 8, 9, *range(len(x) - 3)]


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("batches", [0, 1])
def test_a_continued_run_refuses_the_store_of_another(tmp_path: Path, batches: int, finished: bool) -> None:
    """Even if that has the same shapes: nothing in it changes, and the run's own store goes on."""
    loss, asked = nn.CrossEntropyLoss(), extensions.BatchGrad()
    models = {name: small()[0] for name in "ab"}
    data = small()[1]

    def run(name: str, store: str, calls: int = 100) -> None:
        really = StoreWriter.add

        def add(*given: Any) -> None:
            nonlocal calls
            calls -= 1
            if calls < 0:
                raise KeyboardInterrupt
            really(*given)

        options: dict[str, Any] = {"store": tmp_path / store, "checkpoint": tmp_path / f"kept {name}"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StoreWriter, "add", add)
            compute(models[name], loss, data, asked, batch_size=3, every=1, **options)

    with pytest.raises(KeyboardInterrupt):
        run("a", "a", batches)
    if finished:
        run("b", "b")
    else:
        with pytest.raises(KeyboardInterrupt):
            run("b", "b", 2)
    before = Store(tmp_path / "b")
    rows = before["grad_batch", "0.bias"].torch()
    with pytest.raises(BadInput, match="the checkpoint was made with another store"):
        run("a", "b")
    after = Store(tmp_path / "b")
    assert (after.verify(), after.finished) == (before.samples, finished)
    assert torch.equal(after["grad_batch", "0.bias"].torch(), rows)
    run("a", "a")
    assert Store(tmp_path / "a").finished
