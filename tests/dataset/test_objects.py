"""Batches that are objects, of a class of one's own or of torch_geometric, from the data to the numbers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packprop
from packprop import BadInput, PackpropError, extensions
from packprop.testing import check_model


class Graphs:
    """A batch of graphs, as an object of one's own."""

    def __init__(self, nodes: Tensor, graph: Tensor, classes: Tensor) -> None:
        self.nodes, self.graph, self.classes = nodes, graph, classes
        self.count = len(classes)


@dataclass(frozen=True)
class Held:
    """An object in a dataclass."""

    graphs: Graphs


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, batch: Graphs | Held) -> Tensor:
        graphs = batch.graphs if isinstance(batch, Held) else batch
        assert type(graphs) is Graphs
        nodes = torch.tanh(self.body(graphs.nodes))
        return self.head(nodes.new_zeros(graphs.count, 4).index_add(0, graphs.graph, nodes))


class Loss(Scores):
    def forward(self, batch: Graphs | Held) -> Tensor:
        return loss_of(super().forward(batch), batch)


def loss_of(scores: Tensor, batch: Graphs | Held) -> Tensor:
    return F.cross_entropy(scores, (batch.graphs if isinstance(batch, Held) else batch).classes)


SIZES = ((2, 3), (1, 4, 2), (5,))


def batches() -> list[Graphs]:
    return [
        Graphs(
            torch.randn(sum(sizes), 3),
            torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
            torch.randint(2, (len(sizes),)),
        )
        for sizes in SIZES
    ]


def alone(batch: Graphs) -> list[Graphs]:
    zeros = torch.zeros_like(batch.graph)
    return [
        Graphs(batch.nodes[batch.graph == n], zeros[batch.graph == n], batch.classes[n : n + 1])
        for n in range(batch.count)
    ]


def flat(model: nn.Module, loss: Tensor) -> Tensor:
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, [*model.parameters()])])


FORMS: dict[str, tuple[type[Scores], Any, Callable[[Graphs], Any]]] = {
    "the model returns the loss": (Loss, None, lambda batch: batch),
    "the loss takes the object": (Scores, loss_of, lambda batch: batch),
    "a dataclass around it": (Scores, loss_of, Held),
    "with targets": (Scores, nn.CrossEntropyLoss(), lambda batch: (batch, batch.classes)),
    "among the arguments": (Scores, nn.CrossEntropyLoss(), lambda batch: ({"batch": batch}, batch.classes)),
}


@pytest.mark.parametrize("form", FORMS)
def test_objects_of_ones_own(form: str) -> None:
    kind, loss, made = FORMS[form]
    model, given = kind(), batches()
    data = [made(each) for each in given]
    found = packprop.compute(model, loss, data, [extensions.BatchGrad(), extensions.KFAC()], progress=False)
    scores = Scores()
    scores.load_state_dict(model.state_dict())
    rows = [flat(scores, loss_of(scores(each), each)) / found.samples for one in given for each in alone(one)]
    assert found.samples == 6
    torch.testing.assert_close(
        torch.cat([value.flatten(1) for value in found["grad_batch"].values()], 1), torch.stack(rows)
    )
    with pytest.raises(PackpropError, match="only data tell how many rows each sample has"):
        packprop.compute(model, loss, data, extensions.BatchGrad(), memory="10MiB", progress=False)


@dataclass
class Pairs:
    """A dataclass whose tensors have a row for each sample."""

    left: Tensor
    right: Tensor

    @property
    def both(self) -> Tensor:
        return torch.cat([self.left, self.right], -1)


class OfPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, pairs: Pairs) -> Tensor:
        out: Tensor = self.head(pairs.both)
        return out


def test_a_budget_over_objects() -> None:
    data, model = [Pairs(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(3)], OfPairs()

    def loss(outputs: Tensor, pairs: Pairs) -> Tensor:
        return F.mse_loss(outputs, pairs.left)

    assert packprop.plan(model, loss, data[0], extensions.BatchGrad()).samples == 4
    found, within = (
        packprop.compute(model, loss, data, extensions.DiagGGNExact(), memory=memory, progress=False)
        for memory in (None, "1MiB")
    )
    torch.testing.assert_close(within["diag_ggn_exact"]["head.weight"], found["diag_ggn_exact"]["head.weight"])
    assert check_model(model, loss, data[0], data[0]).error < 1e-10
    shown = packprop.profile(model, loss, data, decode=lambda pairs, _: str(pairs.both.shape), progress=False)
    assert {each.text for each in shown.outlying} == {"torch.Size([3])"}


def test_a_checkpoint_compares_the_tensors_of_objects(tmp_path: Path) -> None:
    model, data = Loss(), batches()
    packprop.compute(model, None, data, extensions.Variance(), checkpoint=tmp_path, progress=False)
    data[0].nodes = data[0].nodes + 1
    with pytest.raises(BadInput, match="some values"):
        packprop.compute(model, None, data, extensions.Variance(), checkpoint=tmp_path, progress=False)


def test_a_profile_counts_the_samples_of_objects() -> None:
    found = packprop.profile(Scores(), loss_of, batches(), timeline=True, progress=False)
    assert found.settings["outputs_of_a_sample"] == 2
    assert found.total.ggn_trace_exact is not None
    assert found.memory is not None
    assert found.memory.samples == 2
    assert "batches of graphs" in found.missing["outlying"]


def test_coverage_of_an_object() -> None:
    assert packprop.coverage(Scores(), batches()[1]).samples == 3


def test_check_model_on_objects() -> None:
    batch = batches()[1]
    with pytest.raises(AssertionError, match="singles="):
        check_model(Scores(), loss_of, batch, batch)
    assert check_model(Scores(), loss_of, batch, batch, singles=alone(batch)).error < 1e-10


def test_an_object_that_cannot_be_copied() -> None:
    batch = batches()[0]
    vars(batch)["lock"] = threading.Lock()
    with pytest.raises(BadInput, match=r"copy\.deepcopy cannot copy it") as error:
        packprop.compute(Loss(), None, [batch], extensions.BatchL2Grad(), progress=False)
    assert "Graphs" in error.value.where


class Writes(Scores):
    """Leaves its hidden values in the object, where the loss reads them."""

    def forward(self, batch: Any) -> Tensor:
        batch.nodes = torch.tanh(self.body(batch.nodes))
        out: Tensor = self.head(batch.nodes.new_zeros(batch.count, 4).index_add(0, batch.graph, batch.nodes))
        return out


def of_hidden(scores: Tensor, batch: Any) -> Tensor:
    hidden = batch.nodes.new_zeros(batch.count, 4).index_add(0, batch.graph, batch.nodes)
    return F.cross_entropy(scores, batch.classes) + F.mse_loss(hidden[:, :4], torch.zeros(batch.count, 4))


def test_the_loss_meets_what_the_model_wrote() -> None:
    model, batch = Writes(), batches()[1]
    nodes = batch.nodes
    found = packprop.compute(model, of_hidden, [batch], extensions.SumGradSquared(), progress=False)
    rows = [flat(model, of_hidden(model(each), each)) / 3 for each in alone(batch)]
    values = torch.cat([value.flatten() for value in found["sum_grad_squared"].values()])
    torch.testing.assert_close(values, torch.stack(rows).square().sum(0))
    assert batch.nodes is nodes

    def beside(scores: Tensor, batch: Any) -> Tensor:
        assert batch.nodes.shape[1] == 4
        return F.cross_entropy(scores, batch.classes)

    assert check_model(model, beside, batch, batch, singles=alone(batch)).error < 1e-10


@pytest.mark.parametrize("held", ["parameter", "module", "method"])
def test_an_object_that_holds_parameters(held: str) -> None:
    """A copy of a parameter is no parameter of the model: its gradient would be missing."""
    model, given = packprop.extend(Scores()), batches()
    parts = {"parameter": model.head.weight, "module": model.head, "method": model.head.forward}

    def loss(scores: Tensor, batch: Any) -> Tensor:
        part = batch.part
        again = F.linear(scores @ part, part) if held == "parameter" else part(scores.repeat(1, 2))
        return F.cross_entropy(again, batch.classes)

    for batch in given:
        vars(batch)["part"] = parts[held]
    found = packprop.compute(model, loss, given, extensions.BatchGrad(), progress=False)
    singles = [each for batch in given for each in alone(batch)]
    for each in singles:
        vars(each)["part"] = parts[held]
    torch.testing.assert_close(
        torch.cat([value.flatten(1) for value in found["grad_batch"].values()], 1),
        torch.stack([flat(model, loss(model(each), each)) / found.samples for each in singles]),
    )


def test_modules_and_generators_beside_tensors_stay_what_they_are() -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor, head: nn.Module, numbers: torch.Generator) -> Tensor:
            assert head is self.head
            out: Tensor = torch.rand(len(x), 1, generator=numbers) * head(x)
            return out

    model, numbers = Drawing(), torch.Generator().manual_seed(0)
    data = [({"x": torch.ones(2, 3), "head": model.head, "numbers": numbers}, torch.ones(2, 2))] * 2
    rows = packprop.compute(model, nn.MSELoss(), data, extensions.BatchL2Grad(), progress=False)["batch_l2"]
    assert len(rows["head.weight"].unique()) == 4


class Keeps(Graphs):
    """Its copies are itself."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class Clones(Graphs):
    """Its copies have clones of the tensors."""

    def __deepcopy__(self, memo: Any) -> Any:
        return Clones(self.nodes.clone(), self.graph.clone(), self.classes.clone())


class Delegates(Graphs):
    """What it does not know, it asks a tensor for: also how it is copied."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["nodes"], name)


@pytest.mark.parametrize("kind", [Keeps, Clones, Delegates])
def test_copies_of_objects_that_keep_their_tensors(kind: type[Graphs]) -> None:
    batch = batches()[0]
    given = kind(batch.nodes, batch.graph, batch.classes)
    with pytest.raises(BadInput, match="does not hand its tensors"):
        packprop.compute(Loss(), None, [given], extensions.BatchL2Grad(), progress=False)


def test_an_object_that_holds_a_generator() -> None:
    data, numbers = batches(), random.Random(0)
    for batch in data:
        vars(batch)["numbers"] = numbers
    drawn: list[float] = []

    def loss(scores: Tensor, batch: Any) -> Tensor:
        drawn.append(batch.numbers.random())
        return F.cross_entropy(scores, batch.classes)

    packprop.compute(Scores(), loss, data, extensions.BatchL2Grad(), progress=False)
    assert len({*drawn}) >= len(data)


class Bag(MutableMapping[str, Any]):
    """A mapping that keeps its entries in an attribute."""

    def __init__(self, **entries: Any) -> None:
        self.entries = entries

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.entries[key] = value

    def __delitem__(self, key: str) -> None:
        del self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def test_a_mapping_of_ones_own_is_not_written_to() -> None:
    batch = batches()[1]
    bag = Bag(batch=batch)
    packprop.compute(Scores(), nn.CrossEntropyLoss(), [(bag, batch.classes)], extensions.BatchL2Grad())
    assert bag["batch"] is batch
    bag = Bag(input=torch.ones(2, 3))
    check_model(nn.Linear(3, 2), nn.MSELoss(), bag, torch.ones(2, 2))
    assert bag["input"].dtype == torch.float32


def test_a_batch_of_graphs_is_no_pair_of_samples() -> None:
    batch = batches()[0]
    tensors = {"nodes": batch.nodes, "graph": batch.graph}
    with pytest.raises(BadInput, match="first axes") as error:
        packprop.compute(Scores(), nn.CrossEntropyLoss(), (tensors, batch.classes), extensions.BatchL2Grad())
    assert "[(inputs, targets)]" in error.value.instead


@pytest.mark.parametrize("level", ["graphs", "nodes"])
def test_batches_of_torch_geometric(level: str) -> None:
    geometric: Any = pytest.importorskip("torch_geometric")
    loader: Any = pytest.importorskip("torch_geometric.loader")
    layers: Any = pytest.importorskip("torch_geometric.nn")

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = layers.GCNConv(3, 4), layers.GCNConv(4, 2)

        def forward(self, batch: Any) -> Tensor:
            nodes = self.second(torch.tanh(self.first(batch.x, batch.edge_index)), batch.edge_index)
            out: Tensor = nodes if level == "nodes" else layers.global_add_pool(nodes, batch.batch)
            return out

    def own(outputs: Tensor, batch: Any) -> Tensor:
        if level == "graphs":
            return F.cross_entropy(outputs, batch.y)
        with packprop.record(documents=batch.batch):  # the nodes of a graph belong together
            return F.cross_entropy(outputs, batch.of_nodes)

    graphs = [
        geometric.data.Data(
            x=torch.randn(n, 3),
            edge_index=torch.randint(n, (2, 2 * n)),
            y=torch.randint(2, (1,)),
            of_nodes=torch.randint(2, (n,)),
        )
        for n in (3, 5, 2, 4, 6)
    ]
    model = Network()
    found = packprop.compute(
        model, own, loader.DataLoader(graphs, batch_size=2), extensions.BatchGrad(), progress=False
    )
    singles = [geometric.data.Batch.from_data_list([each]) for each in graphs]
    share = [len(each.x) / 20 if level == "nodes" else 1 / 5 for each in graphs]
    rows = [flat(model, own(model(one), one) * part) for one, part in zip(singles, share, strict=True)]
    assert found.samples == 5
    torch.testing.assert_close(
        torch.cat([value.flatten(1) for value in found["grad_batch"].values()], 1), torch.stack(rows)
    )
