"""Parameters whose Kronecker factors would be too large: named, given as diagonals, or left out."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions, kronecker
from packprop.compat.averaged import BOTEV_MARTENS, CHEN
from packprop.engine.algebra import factors
from packprop.engine.tensors.nesting import tensors_in
from packprop.errors import PackpropError, PackpropWarning
from tests.references.running import assert_near

SIZE = 10


class Words(nn.Module):
    """A table of 14 rows, positions in a raw parameter of 12 entries, a head with 11 outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.hidden = nn.Embedding(14, 3), nn.Linear(3, 5)
        self.positions = nn.Parameter(torch.randn(4, 3))
        self.head = nn.Linear(5, 11)

    def forward(self, index: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.hidden(self.words(index) + self.positions)).sum(1))
        return out


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(14, (6, 4)), torch.randint(11, (6,))


def blocks(extension: Any) -> dict[str, Any]:
    """What is saved on each parameter, in double precision."""
    model, loss = packprop.extend(Words().double()), packprop.extend(nn.CrossEntropyLoss())
    index, target = batch()
    value = loss(model(index), target)
    with packprop.backpack(extension):
        value.backward()
    return {name: getattr(p, extension.savefield, None) for name, p in model.named_parameters()}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "LARGEST_FACTOR", SIZE)


def kflr(**options: Any) -> Any:
    return extensions.KFLR(**options)


def kfac(**options: Any) -> Any:
    return extensions.KFAC(generator=torch.Generator().manual_seed(0), **options)


def ekfac(**options: Any) -> Any:
    return extensions.EKFAC(fisher="exact", **options)


@pytest.mark.usefixtures("small")
def test_the_error_names_the_parameter_and_the_option() -> None:
    named = r"parameter '(positions|head\.weight|head\.bias)'.*1[12] rows"
    for make in (kflr, ekfac):
        with pytest.raises(PackpropError, match=named) as caught:
            blocks(make(otherwise="error"))
        assert "otherwise='diagonal'" in str(caught.value)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("make", [kflr, kfac, ekfac])
def test_the_default_keeps_diagonals_and_says_so_once(make: Any) -> None:
    """Of a head, its bias and raw positions; not of a table, whose inputs have no other entries."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        found = blocks(make())
        blocks(make())  # the same text from the same line: once
    (text,) = {str(each.message) for each in told if "diagonals" in str(each.message)}
    named = re.findall(r"'([\w.]+)'", text.partition("otherwise")[0])
    assert sorted(named) == ["head.bias", "head.weight", "positions"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        meant = blocks(make(otherwise="diagonal"))
    for name, block in meant.items():
        for one, other in zip(tensors_in(found[name]), tensors_in(block), strict=True):
            assert torch.equal(one, other)


@pytest.mark.usefixtures("small")
def test_over_a_data_set_the_default_says_so() -> None:
    with pytest.warns(
        PackpropWarning, match=r"kept as their diagonals, of 'positions', 'head.weight', 'head.bias'"
    ):
        packprop.compute(Words(), nn.CrossEntropyLoss(), batch(), kfac(), progress=False, batch_size=3)


@pytest.mark.parametrize("approximation", ["mixed", "expand", "reduce"])
@pytest.mark.parametrize("make", [kflr, kfac])
def test_a_large_factor_is_its_diagonal(make: Any, approximation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every factor of more than ten rows is a vector, the diagonal of the matrix that it would be."""
    whole = blocks(make(approximation=approximation))
    monkeypatch.setattr(factors, "LARGEST_FACTOR", SIZE)
    found = blocks(make(approximation=approximation, otherwise="diagonal"))
    vectors = 0
    for name, block in found.items():
        assert len(block) == len(whole[name])
        for factor, reference in zip(block, whole[name], strict=True):
            if len(reference) > SIZE:
                vectors += 1
                assert_near(factor, reference.diagonal(), name)
            else:
                assert_near(factor, reference, name)
    assert vectors == 4


def columns_of(block: kronecker.Eigen) -> Tensor:
    """Eigenvectors in rows, in the order of the parameter."""
    whole = [vectors.diag() if vectors.dim() == 1 else vectors for vectors in block.vectors]
    if len(whole) == 1:
        return whole[0].mT
    pairs = torch.einsum("ab,cd->bdac", *whole).flatten(0, 1)
    pairs = pairs if block.order is None else block.order.to_parameter(pairs)
    return pairs.reshape(len(pairs), -1)


class Grouped(nn.Module):
    """A convolution in groups with 12 outputs, one with 18 patches, a map of shared positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.grouped, self.wide = nn.Conv1d(2, 12, 2, groups=2), nn.Conv1d(12, 3, 2)
        self.shared, self.head = nn.Linear(2, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.shared(torch.tanh(self.wide(torch.tanh(self.grouped(x))))))
        out: Tensor = self.head(h.sum(1))
        return out


def corrected(model: nn.Module, given: Tensor, target: Tensor, **options: Any) -> dict[str, tuple[Any, Tensor]]:
    """What EKFAC saves on each parameter, and the exact block from a square root."""
    packprop.extend(model)
    loss = packprop.extend(nn.CrossEntropyLoss())
    asked = ekfac(**options), extensions.SqrtGGNExact()
    value = loss(model(given), target)
    with packprop.backpack(*asked):
        value.backward()
    found = {}
    for name, p in model.named_parameters():
        root = p.sqrt_ggn_exact.flatten(2)
        found[name] = getattr(p, "ekfac", None), torch.einsum("vnp,vnq->pq", root, root)
    return found


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("approximation", ["mixed", "expand", "reduce"])
@pytest.mark.parametrize("make", [Words, Grouped])
def test_the_eigenvectors_of_a_large_factor_are_unit_vectors(make: Any, approximation: Any) -> None:
    """Eigenvalues are what the block itself has on its diagonal in the basis: never less than a diagonal."""
    given, target = batch() if make is Words else (torch.randn(6, 2, 4).double(), torch.randint(4, (6,)))
    options = {"approximation": approximation, "otherwise": "diagonal"}
    vectors = 0
    for name, (found, block) in corrected(make().double(), given, target, **options).items():
        for basis in found.vectors:
            assert basis.dim() == (1 if len(basis) > SIZE else 2)
            vectors += basis.dim() == 1
            assert basis.dim() == 2 or torch.equal(basis, torch.ones_like(basis))
        rows = columns_of(found)
        assert_near(found.values.flatten(), ((rows @ block) * rows).sum(1), f"eigenvalues of {name}")
        assert_near(kronecker.trace(found), block.trace(), f"trace of {name}")
    assert vectors == (4 if make is Words else 6)


def test_the_inputs_of_a_table_have_no_other_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """One-hot inputs: the diagonal is the whole factor, so that nothing needs to be allowed."""
    for extension in (kflr(), extensions.EKFAC(fisher="exact")):
        monkeypatch.setattr(factors, "LARGEST_FACTOR", 2**14)
        whole = blocks(extension)["words.weight"]
        monkeypatch.setattr(factors, "LARGEST_FACTOR", 12)
        block = blocks(extension)["words.weight"]
        last = block.vectors[1] if isinstance(block, kronecker.Eigen) else block[1]
        assert last.dim() == 1
        if isinstance(block, list):
            assert_near(kronecker.dense(block), kronecker.dense(whole), "the block")
        else:
            assert_near(kronecker.trace(block), kronecker.trace(whole), "the trace")
            vector = torch.randn(14, 3, dtype=torch.float64)
            dense = kronecker.dense(block)
            assert_near(kronecker.multiply(block, vector).flatten(), dense @ vector.flatten(), "a product")
            solved = torch.linalg.solve(
                dense + 0.1 * torch.eye(len(dense), dtype=dense.dtype), vector.flatten()
            )
            assert_near(kronecker.solve(block, vector, 0.1).flatten(), solved, "a solution")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("make", "value"), [(kflr, "kflr"), (ekfac, "ekfac")], ids=["factors", "eigenvectors"])
def test_what_is_skipped_is_named_once(make: Any, value: str) -> None:
    with pytest.warns(PackpropWarning, match=f"no {value} for") as caught:
        found = blocks(make(otherwise="skip"))
    (warning,) = caught
    for name in ("positions", "head.weight", "head.bias"):
        assert found[name] is None
        assert repr(name) in str(warning.message)
    assert all(found[name] is not None for name in ("hidden.weight", "hidden.bias", "words.weight"))


def hbp(backprop: str, ea: str = BOTEV_MARTENS) -> Any:
    return lambda **options: extensions.HBP(
        backprop_strategy=backprop, loss_hessian_strategy="exact", ea_strategy=ea, **options
    )


AVERAGED = {
    "KFRA": extensions.KFRA,
    "HBP": hbp("average"),
    "averages": hbp("average", CHEN),
    "columns": hbp("sqrt"),
}


def of_chain(extension: Any) -> dict[str, Any]:
    """What is saved on a chain whose first layer has 12 inputs."""
    torch.manual_seed(0)
    layers = nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3)
    model, loss = packprop.extend(nn.Sequential(*layers).double()), packprop.extend(nn.CrossEntropyLoss())
    value = loss(model(torch.randn(6, 12).double()), torch.randint(3, (6,)))
    with packprop.backpack(extension):
        value.backward()
    return {name: getattr(p, extension.savefield, None) for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", AVERAGED)
def test_large_inputs_of_averaged_factors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = AVERAGED[name]
    whole = of_chain(make())
    monkeypatch.setattr(factors, "LARGEST_FACTOR", SIZE)
    with pytest.raises(PackpropError, match=r"parameter '0\.weight'.*12 rows") as caught:
        of_chain(make(otherwise="error"))
    assert "otherwise='diagonal'" in str(caught.value)
    found = of_chain(make(otherwise="diagonal"))
    for parameter, block in found.items():
        for place, (factor, reference) in enumerate(zip(block, whole[parameter], strict=True)):
            large = parameter == "0.weight" and place == 1
            assert_near(factor, reference.diagonal() if large else reference, parameter)
    with pytest.warns(PackpropWarning, match=r"'0\.weight'"):
        skipped = of_chain(make(otherwise="skip"))
    assert [name for name, block in skipped.items() if block is None] == ["0.weight"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("otherwise", ["diagonal", "skip"])
def test_batches_merge(otherwise: Any) -> None:
    index, target = batch()
    model, loss = Words().double(), nn.CrossEntropyLoss()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PackpropWarning)
        whole = blocks(kflr(otherwise=otherwise))
        data = [(index[:2], target[:2]), (index[2:], target[2:])]
        result = packprop.compute(model, loss, data, [kflr(otherwise=otherwise)], progress=False)["kflr"]
    for name, block in whole.items():
        if block is None:
            assert name not in result
            continue
        for factor, reference in zip(result[name], block, strict=True):
            assert_near(factor, reference, name)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("make", [kflr, ekfac])
def test_a_plan_counts_diagonals(make: Any) -> None:
    loss = nn.CrossEntropyLoss()
    planned = packprop.plan(Words(), loss, batch(), [make(otherwise="diagonal")])
    saved = blocks(make(otherwise="diagonal"))
    assert planned.results == sum(4 * tensor.numel() for tensor in tensors_in([*saved.values()]))


DIAGONAL = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)


@pytest.mark.parametrize("places", [(0,), (1,), (0, 1)])
def test_helpers_take_a_vector_for_a_diagonal_matrix(places: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    root = torch.randn(3, 5, dtype=torch.float64)
    mixed: list[Tensor] = [DIAGONAL if place in places else root @ root.T for place in range(2)]
    plain = [factor.diag() if factor.dim() == 1 else factor for factor in mixed]
    vectors = torch.randn(4, 3, 3, dtype=torch.float64)
    assert_near(kronecker.dense(mixed), kronecker.dense(plain), "dense")
    assert_near(kronecker.dense(kronecker.eigen(mixed)), kronecker.dense(plain), "eigen")
    assert_near(kronecker.multiply(mixed, vectors), kronecker.multiply(plain, vectors), "multiply")
    assert_near(kronecker.solve(mixed, vectors, 0.1), kronecker.solve(plain, vectors, 0.1), "solve")
    inverses = [kronecker.dense(kronecker.inverse(each, 0.1)) for each in (mixed, plain)]
    assert_near(*inverses, "inverse")
    assert_near(kronecker.trace(mixed), kronecker.trace(plain), "trace")
    assert_near(kronecker.logdet(mixed, 0.1), kronecker.logdet(plain, 0.1), "logdet")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("make", [kflr, ekfac])
def test_factors_without_rows_are_not_too_large(make: Any) -> None:
    torch.manual_seed(0)
    used, none = nn.Linear(3, 2), nn.Linear(3, 0)
    x, target = torch.randn(4, 3), torch.randint(2, (4,))
    extension = make()
    with warnings.catch_warnings(), packprop.backpack(extension):
        warnings.simplefilter("error", PackpropWarning)
        nn.functional.cross_entropy(torch.cat([used(x), none(x)], 1), target).backward()
    for parameter in (*used.parameters(), *none.parameters()):
        assert isinstance(getattr(parameter, extension.savefield), list | kronecker.Eigen)
