"""Functions without a rule, pulled back for all samples at once: right, or left to one pull for each sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from packprop.functions import vectorised
from packprop.functions.vectorised import Copied, gradients_of_copies
from packprop.tensors.layout import Layout

SAMPLES = 5
Function = Callable[[Tensor, Tensor], Tensor]


def steps(x: Tensor, w: Tensor) -> Tensor:
    """As often as an entry says: ``vmap`` cannot read one."""
    for _ in range(int(w.detach().abs().sum().item()) % 2 + 1):
        x = x.lerp(w, 0.3).sin()
    return x


TAKEN: dict[str, tuple[Function, tuple[int, ...]]] = {
    "distances": (torch.cdist, (4, 3)),
    "interpolation": (lambda x, w: torch.lerp(x, w, x.sigmoid()), (3,)),
    "bilinear": (lambda x, w: torch.einsum("nd,def,ne->nf", x, w, x), (3, 3, 2)),
    "solution": (lambda x, w: torch.linalg.solve(w + 9 * torch.eye(3), x[..., None])[..., 0], (3, 3)),
    "largest of a bag": (lambda x, w: F.embedding_bag((x.abs() * 2).long() % 6, w, mode="max"), (6, 2)),
    "loops": (steps, (3,)),
    "as many as samples": (torch.cdist, (SAMPLES, 3)),
    "a row for each sample": (lambda x, w: x * w, (SAMPLES, 3)),
    "a query for each sample": (
        lambda x, w: F.scaled_dot_product_attention(
            w, torch.stack([x, x.sin()], 1), torch.stack([x, x.cos()], 1)
        ),
        (SAMPLES, 2, 3),
    ),
}

LEFT: dict[str, tuple[Function, tuple[int, ...]]] = {
    "in another order": (lambda x, w: x.flip(0) * w, (3,)),
    "of the whole batch": (lambda x, w: (x - x.mean(0)) * w, (3,)),
    "a row of another sample": (lambda x, w: x * w.flip(0), (SAMPLES, 3)),
}


def pulled_back(
    function: Function, weight: Tensor, x: Tensor, chosen: Sequence[int], columns: int = 2
) -> tuple[Tensor | None, Tensor]:
    """All at once, and the definition: cotangents of a single sample, pulled back through the whole batch."""
    weight = weight.requires_grad_(True)
    out = function(x, weight)
    cotangent = torch.randn(columns, *out.shape, dtype=out.dtype)
    expected = torch.stack(
        [
            torch.stack([torch.autograd.grad(out[n], weight, column[n], retain_graph=True)[0] for n in chosen])
            for column in cotangent
        ]
    )
    copied = Copied(function, ((x, weight), {}), weight, [])
    return gradients_of_copies(copied, [out], [cotangent], [Layout(0, SAMPLES)], chosen), expected


@pytest.mark.parametrize(
    "chosen", [range(SAMPLES), [1, 2, 4], [4, 0, 3, 1, 2]], ids=["all", "some", "any order"]
)
@pytest.mark.parametrize("name", TAKEN)
def test_gradients_of_single_samples(name: str, chosen: Sequence[int]) -> None:
    function, shape = TAKEN[name]
    x = torch.randn(SAMPLES, 3, dtype=torch.float64)
    found, expected = pulled_back(function, torch.randn(shape).double(), x, chosen)
    assert found is not None
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("weight", ["random", "zeros"])
@pytest.mark.parametrize("name", LEFT)
def test_functions_of_more_than_a_sample_are_left(name: str, weight: str) -> None:
    """Where a weight of zeros hides in the outputs what a function does, the sum of the gradients shows it."""
    function, shape = LEFT[name]
    made = torch.randn(shape).double() if weight == "random" else torch.zeros(shape).double()
    x = torch.randn(SAMPLES, 3, dtype=torch.float64)
    found, expected = pulled_back(function, made, x, range(SAMPLES))
    assert found is None or torch.allclose(found, expected)
    if name == "of the whole batch":
        assert found is None


def test_an_attempt_in_vain_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("_all_at_once", "_one_after_another"):
        make = getattr(vectorised, name)

        def counted(*given: Any, name: str = name, make: Any = make) -> Any:
            calls.append(name)
            return make(*given)

        monkeypatch.setattr(vectorised, name, counted)
    monkeypatch.setattr(vectorised, "_KNOWN", {})
    x, weight = torch.randn(SAMPLES, 3, dtype=torch.float64), torch.randn(3).double()
    for _ in range(2):
        pulled_back(steps, weight.clone(), x, range(SAMPLES))
    assert calls == ["_all_at_once", "_one_after_another", "_one_after_another"]
