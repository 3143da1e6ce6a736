"""The numbers that the rules of losses say their terms are divided by, beside torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from packprop.engine.functions.losses.description import describe
from tests.references.running import assert_near

INPUT, TARGET, WEIGHT = (torch.rand(4, 3, dtype=torch.float64) * 0.8 + 0.1 for _ in range(3))
CLASSES = torch.tensor([0, 2, 1, 1])
OLD = {"size_average": False}

CALLS: dict[str, tuple[Any, torch.Tensor, dict[str, Any], dict[str, Any]]] = {
    f"{function.__name__}-{name}": (function, target, options, {"reduction": "sum"} if name != "old" else OLD)
    for function, target, kinds in [
        (F.mse_loss, TARGET, {"plain": {}, "weight": {"weight": WEIGHT}, "old": {}}),
        (F.l1_loss, TARGET, {"plain": {}, "weight": {"weight": WEIGHT}, "old": {}}),
        (F.huber_loss, TARGET, {"plain": {}, "weight": {"weight": WEIGHT}}),
        (F.smooth_l1_loss, TARGET, {"plain": {}, "old": {}}),
        (F.binary_cross_entropy, TARGET, {"plain": {}, "weight": {"weight": WEIGHT}, "old": {}}),
        (F.kl_div, TARGET, {"plain": {}, "old": {}}),
        (F.poisson_nll_loss, TARGET, {"plain": {}, "old": {}}),
        (F.cross_entropy, CLASSES, {"plain": {}, "weight": {"weight": WEIGHT[0]}, "old": {}}),
        (F.nll_loss, CLASSES, {"weight": {"weight": WEIGHT[0]}, "ignored": {"ignore_index": 1}}),
    ]
    for name, options in kinds.items()
}


@pytest.mark.filterwarnings("ignore:size_average", "ignore:reduction")
@pytest.mark.parametrize(("function", "target", "options", "summing"), CALLS.values(), ids=CALLS)
def test_a_mean_is_a_sum_over_the_divisor(
    function: Any, target: torch.Tensor, options: dict[str, Any], summing: dict[str, Any]
) -> None:
    total, mean = (function(INPUT, target, **options, **given) for given in (summing, {}))
    divisor = describe(function, (INPUT, target), options).divisor
    assert divisor is not None
    assert_near(mean, total / divisor, function.__name__)
    assert describe(function, (INPUT, target), {**options, **summing}).divisor == 1
