"""When functions of the inputs run again on changed inputs: as seldom as that can show something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import packprop
from packprop.tensors import dry
from tests.cases.models.wrapping import Apply
from tests.versions import needs_hooks


class Operations(TorchDispatchMode):
    """Counts what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operations(model: nn.Module, x: Tensor) -> Counter[str]:
    with Operations() as counted:
        model(x)
    return counted.counts


def linear() -> nn.Module:
    return nn.Linear(3, 2)


CASES = [
    pytest.param(linear, (5, 3), False, id="linear-of-rows"),
    pytest.param(linear, (5, 5, 3), True, id="linear-of-positions"),
    pytest.param(linear, (5, 4, 3), False, id="linear-where-axes-differ"),
    pytest.param(lambda: nn.Conv2d(3, 2, 1), (5, 3, 4, 4), False, id="convolution"),
    pytest.param(
        lambda: Apply(lambda m, x: m.a(x.flatten(1)[:, :6]), a=nn.Linear(6, 2)), (5, 5, 3), True, id="flat"
    ),
    pytest.param(
        lambda: Apply(lambda m, x: checkpoint(m.a, x, use_reentrant=False), a=linear()),
        (5, 4, 3),
        False,
        id="checkpoint",
    ),
]


@needs_hooks  # elsewhere, nothing runs again while operations are counted
@pytest.mark.parametrize(("build", "shape", "looks"), CASES)
def test_only_the_first_call_of_a_shape(
    build: Callable[[], nn.Module], shape: tuple[int, ...], looks: bool
) -> None:
    """Every other call computes what it does without packprop; so does this one where nothing is to be seen."""
    model, x = build(), torch.randn(shape)
    plain = operations(model, x)
    packprop.extend(model)
    assert (operations(model, x) != plain) == looks
    assert operations(model, x) == plain
    assert (operations(model, (x[:-1, :-1] if x.dim() == 3 else x[:-1]).contiguous()) != plain) == looks


@pytest.mark.parametrize(("build", "shape", "looks"), CASES)
def test_no_random_states_once_it_is_known(
    build: Callable[[], nn.Module], shape: tuple[int, ...], looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = packprop.extend(build()), torch.randn(shape)
    model(x)

    def fail(*_: Any) -> Any:
        raise AssertionError

    for place in ("recorder", "witnesses"):
        monkeypatch.setattr(f"packprop.recording.{place}.random_states", fail)
    model(x)


def test_not_in_a_dry_run() -> None:
    model, x = linear(), torch.randn(5, 4, 3)
    plain = operations(model, x)
    packprop.extend(model)
    with dry.dry_run():
        assert operations(model, x) == plain


def test_inputs_that_cannot_be_changed() -> None:
    """Sparse and nested tensors go through as they are."""
    model = packprop.extend(Apply(lambda m, x: m.a(x.to_dense()), a=linear()))
    x = torch.randn(5, 3)
    assert torch.equal(model(x.to_sparse()), model.a(x))
