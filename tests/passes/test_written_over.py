"""Results of the step before are written over if nobody holds them, and left alone if somebody does."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn

import packprop
from packprop import extensions
from packprop.engine.algebra.monoid import Partial
from packprop.engine.passes.chunks import ChunkSizes
from packprop.errors import PackpropError
from tests.versions import needs_counting


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 3))


def one_step(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    loss = packprop.extend(nn.CrossEntropyLoss())(packprop.extend(model)(x), y)
    with packprop.backpack(extensions.BatchGrad(), **options):
        loss.backward()
    found: Tensor = model[0].weight.grad_batch
    return found


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks so small that results are put together of several; one that comes whole is the chunk itself."""
    monkeypatch.setattr("packprop.engine.context.default_chunk_sizes", lambda device: ChunkSizes(2**12, 2**12))


LAYERS: dict[str, tuple[Any, Any]] = {
    "patches": (nn.Conv2d(32, 32, 3), (8, 32, 5, 5)),
    "groups": (nn.Conv2d(32, 32, 3), (8, 32, 5, 5)),
    "a linear layer": (nn.Linear(96, 96), (8, 3, 96)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_rows_that_are_the_result_need_no_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows took the place of temporary memory, so that a pass computed results in chunks and copied these."""
    layer, shape = LAYERS[name]
    torch.manual_seed(0)
    model, x, counts = nn.Sequential(layer, nn.Flatten()), torch.randn(shape), []

    def put(self: Any, value: Any, columns: Any, samples: Any, put: Any = Partial.put) -> None:
        counts.append(samples.stop - samples.start)
        put(self, value, columns, samples)

    def step(*asked: Any) -> tuple[Tensor, list[int]]:
        output = packprop.extend(model)(x)
        loss = packprop.extend(nn.MSELoss())(output, torch.zeros_like(output))
        counts.clear()
        algorithm = "groups" if name == "groups" else "patches"
        with packprop.algorithms(convolutions=algorithm), packprop.backpack(*asked):
            loss.backward()
        return layer.weight.grad_batch, [count for count in counts if count != 8]

    monkeypatch.setattr(Partial, "put", put)
    weight = 4 * sum(parameter.numel() for parameter in layer.parameters())
    sizes = ChunkSizes(6 * weight, 6 * weight)  # two chunks of samples with their rows, or all without them
    monkeypatch.setattr("packprop.engine.context.default_chunk_sizes", lambda device: sizes)
    rows, in_parts = step(extensions.BatchGrad())
    assert not in_parts
    expected, in_parts = step(extensions.BatchGrad(), extensions.SumGradSquared())  # the squares are temporary
    assert in_parts
    torch.testing.assert_close(rows, expected)


HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda t: t,
    "a list": lambda t: [t],
    "a view": lambda t: t[1:],
    "detached": lambda t: t.detach(),
    "an array": lambda t: t.numpy(),
    "its storage": lambda t: t.untyped_storage(),
    "a graph": lambda t: (t * torch.ones((), requires_grad=True)).sum(),
    "dlpack": lambda t: torch.utils.dlpack.to_dlpack(t),
    "weakly": weakref.ref,
    "shared memory": lambda t: t.share_memory_() is None,
}


@needs_counting
@pytest.mark.usefixtures("small_chunks")
def test_results_that_nobody_holds_are_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    model, taken = wide(), []
    allocated = Partial._allocated

    def noted(self: Any, like: Tensor, shape: Any) -> Tensor:
        there = None if self._spare is None else self._spare.data_ptr()
        made = allocated(self, like, shape)
        taken.append(made.data_ptr() == there)
        return made

    monkeypatch.setattr(Partial, "_allocated", noted)
    x, y = torch.randn(8, 30), torch.randint(3, (8,))
    place = one_step(model, x, y).data_ptr()
    assert not any(taken)
    assert one_step(model, 2 * x, y).data_ptr() == place
    assert sum(taken) == 2  # both weights; a chunk brings those of biases whole
    torch.testing.assert_close(one_step(model, 2 * x, y), one_step(wide(), 2 * x, y))
    kept = one_step(model, x, y)
    assert kept._base is None
    before = kept.clone()
    assert one_step(model, x, y).data_ptr() != place
    torch.testing.assert_close(kept, before, rtol=0, atol=0)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("how", HOLDS)
def test_results_that_somebody_holds_stay_as_they_are(how: str) -> None:
    model = wide()
    x, y = torch.randn(8, 30), torch.randint(3, (8,))
    held = HOLDS[how](one_step(model, x, y))
    place = model[0].weight.grad_batch.data_ptr()
    before = model[0].weight.grad_batch.clone()
    found = one_step(model, 2 * x, y).data_ptr()
    if how == "weakly":  # it is gone, and not another one
        assert held() is None
        return
    assert found != place
    if how == "itself":
        torch.testing.assert_close(held, before, rtol=0, atol=0)
    elif how == "an array":
        torch.testing.assert_close(torch.from_numpy(held), before, rtol=0, atol=0)
    elif how == "a graph":
        held.backward()  # PyTorch refuses if what it saved was changed


@pytest.mark.usefixtures("small_chunks")
def test_a_pass_that_is_refused_leaves_the_results_of_the_one_before() -> None:
    model = wide()
    x, y = torch.randn(8, 30), torch.randint(3, (8,))
    place = one_step(model, x, y).data_ptr()
    loss = (model(x) ** 2).sum()
    with pytest.raises(PackpropError), packprop.backpack(extensions.BatchGrad(), extensions.DiagGGNExact()):
        loss.backward()
    assert model[0].weight.grad_batch.data_ptr() == place


FOREIGN: dict[str, Callable[[Tensor], Any]] = {
    "an array's": lambda t: torch.from_numpy(t.numpy().copy()),
    "sparse": lambda t: t.to_sparse(),
    "another precision": lambda t: t.double(),
    "a number": lambda t: 3,
}


@pytest.mark.parametrize("how", FOREIGN)
def test_what_a_user_has_put_in_the_place_of_a_result_is_not_written_over(how: str) -> None:
    model = wide()
    x, y = torch.randn(8, 30), torch.randint(3, (8,))
    mine = model[0].weight.grad_batch = FOREIGN[how](one_step(model, x, y))
    array = mine.numpy() if how == "an array's" else None
    before = None if array is None else array.copy()
    del mine
    torch.testing.assert_close(one_step(model, 2 * x, y), one_step(wide(), 2 * x, y))
    if array is not None:
        assert (array == before).all()


def test_a_refusal_comes_before_any_value() -> None:
    model = wide()
    x, y = torch.randn(8, 30), torch.randint(3, (8,))
    place = one_step(model, x, y).data_ptr()
    loss = packprop.extend(nn.CrossEntropyLoss())(model(x), y)
    asked = extensions.DiagHessian(), extensions.BatchJacobian(outputs=[99]), extensions.BatchGrad()
    with pytest.raises(packprop.BadInput), packprop.backpack(*asked):
        loss.backward()
    assert model[0].weight.grad_batch.data_ptr() == place


@pytest.mark.usefixtures("small_chunks")
def test_results_of_another_batch_size_do_not_fit() -> None:
    model = wide()
    x, y = torch.randn(8, 30), torch.randint(3, (8,))
    one_step(model, x, y)
    found = one_step(model, x[:5], y[:5])
    torch.testing.assert_close(found, one_step(wide(), x[:5], y[:5]))
