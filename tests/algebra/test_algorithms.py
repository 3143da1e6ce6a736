"""Algorithms that are chosen by name: the same numbers, by other means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import packprop
from packprop import extensions
from packprop.engine.functions.rules import convolution
from packprop.engine.passes.chunks import ChunkSizes
from packprop.engine.tensors.nesting import tensors_in
from packprop.errors import BadInput
from tests.memory.steps import data, network, step
from tests.selection import one_in


@one_in(2)
@pytest.mark.parametrize(
    "names",
    [
        {"norms": "gradients"},
        {"norms": "products"},
        {"products": "single"},
        {"products": "batched"},
        {"factors": "patches"},
        {"factors": "shifts"},
        {"convolutions": "patches"},
        {"convolutions": "groups"},
    ],
    ids=str,
)
def test_a_forced_algorithm_changes_no_number(names: dict[str, str]) -> None:
    asked = [extensions.BatchL2Grad(), extensions.DiagGGNExact()]
    asked.append(extensions.KFAC(generator=torch.Generator().manual_seed(0)))
    free, forced = network(), network()
    step(free, data(), *asked[:2], extensions.KFAC(generator=torch.Generator().manual_seed(0)))
    with packprop.algorithms(**names):
        step(forced, data(), *asked)
    for p, q in zip(free.parameters(), forced.parameters(), strict=True):
        for name in ("batch_l2", "diag_ggn_exact", "kfac", "grad"):
            for mine, other in zip(tensors_in(getattr(p, name)), tensors_in(getattr(q, name)), strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


CONVOLUTIONS = {
    "strided, groups": (nn.Conv2d(4, 6, 3, padding=1, stride=2, groups=2), (5, 4, 9, 9)),
    "uneven padding": (nn.Conv1d(3, 2, 4, padding="same"), (5, 3, 9)),
    "one filter for each channel": (nn.Conv2d(6, 6, 7, padding=3, groups=6), (5, 6, 14, 14)),
    "one filter for each channel, strided": (nn.Conv2d(6, 6, 3, stride=2, groups=6), (5, 6, 24, 24)),
    "3d, dilated": (nn.Conv3d(2, 3, 2, dilation=2), (5, 2, 6, 6, 6)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1, groups=2), (5, 4, 7, 7)),
    "transposed 1d": (nn.ConvTranspose1d(4, 6, 3, stride=3, dilation=2), (5, 4, 7)),
    "transposed, longer": (nn.ConvTranspose1d(2, 3, 3, dilation=3, output_padding=2), (5, 2, 7)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_by_groups_are_those_by_patches(name: str) -> None:
    layer, shape = CONVOLUTIONS[name]
    torch.manual_seed(0)
    model = nn.Sequential(layer, nn.Flatten()).double()
    asked = [extensions.BatchGrad(), extensions.SumGradSquared(), extensions.BatchL2Grad()]
    x = torch.randn(shape, dtype=torch.float64)
    batch = x, torch.randn_like(model(x).detach())
    found = []
    for algorithm in ("patches", "groups"):
        loss = packprop.extend(nn.MSELoss())(packprop.extend(model)(batch[0]), batch[1])
        with packprop.algorithms(convolutions=algorithm), packprop.backpack(*asked):
            loss.backward()
        found.append([getattr(layer.weight, extension.savefield) for extension in asked])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)


@one_in(2)
@pytest.mark.parametrize("approximation", ["mixed", "expand", "reduce"])
@pytest.mark.parametrize("channels", [8, 64])
@pytest.mark.parametrize("stride", [1, 2])
def test_factors_of_groups_of_channels(approximation: Any, channels: int, stride: int) -> None:
    """Moments from shifts were not averaged over groups: factors of 16 channels and more were too large."""
    torch.manual_seed(0)
    layer = nn.Conv2d(channels, 4, 3, stride, padding=(1, 0), groups=2)
    model, x = (
        packprop.extend(nn.Sequential(layer, nn.Flatten()).double()),
        torch.randn(3, channels, 5, 6).double(),
    )
    patches = nn.functional.unfold(x, 3, padding=(1, 0), stride=stride).unflatten(1, (2, -1))  # n g i s
    if approximation == "reduce":
        patches = patches.mean(3, keepdim=True)
    expected = torch.einsum("ngis,ngjs->ij", patches, patches) / 2 / 3
    if approximation == "expand":
        expected /= patches.shape[3]
    for algorithm in ("shifts", "patches"):
        output = model(x)
        loss = packprop.extend(nn.MSELoss())(output, torch.zeros_like(output))
        asked = extensions.KFAC(approximation=approximation)
        with packprop.algorithms(factors=algorithm), packprop.backpack(asked):
            loss.backward()
        torch.testing.assert_close(layer.weight.kfac[1], expected)


def test_the_least_memory_unfolds_nothing(monkeypatch: Any) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("inputs were unfolded")

    step(network(), data(), extensions.BatchGrad())
    monkeypatch.setattr(convolution, "patches", refused)
    with packprop.algorithms(convolutions="patches"), pytest.raises(AssertionError, match="unfolded"):
        step(network(), data(), extensions.BatchGrad())
    monkeypatch.setattr("packprop.engine.context.default_chunk_sizes", lambda device: ChunkSizes(0, 0, held=0))
    step(network(), data(), extensions.BatchGrad(), extensions.BatchL2Grad(), extensions.Variance())


def test_a_forced_algorithm_is_the_one_that_runs(monkeypatch: Any) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("patches by shifts were used")

    monkeypatch.setattr(convolution, "shift_moment", refused)
    with packprop.algorithms(factors="patches"):
        step(network(), data(), extensions.KFAC())
    with pytest.raises(AssertionError, match="by shifts"), packprop.algorithms(factors="shifts"):
        step(network(), data(), extensions.KFAC())


@pytest.mark.parametrize("names", [{"norms": "fast"}, {"products": ""}, {"factors": "gradients"}], ids=str)
def test_algorithms_that_do_not_exist(names: dict[str, str]) -> None:
    with pytest.raises(BadInput, match="no such algorithm"), packprop.algorithms(**names):
        pass


def test_the_older_switch_forces_convolutions_by_groups() -> None:
    from packprop.core.derivatives.convnd import weight_jac_t_save_memory

    from packprop.engine.algebra.choices import forced_algorithm

    with weight_jac_t_save_memory(save_memory=True):
        assert forced_algorithm("convolutions") == "groups"
        with weight_jac_t_save_memory(save_memory=False):
            assert not weight_jac_t_save_memory.is_saving()
    assert forced_algorithm("convolutions") is None
