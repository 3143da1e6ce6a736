"""Cases about normalisations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from tests.cases.building import raw, use
from tests.cases.case import Case
from tests.versions import INSTANCE_NORM_WRITES


def cases() -> Iterator[Case]:
    yield use("batchnorm1d-2d", lambda: nn.BatchNorm1d(4), (4,), 4)
    yield use("batchnorm1d-3d", lambda: nn.BatchNorm1d(2), (2, 3), 6)
    yield use("batchnorm2d", lambda: nn.BatchNorm2d(2), (2, 2, 3), 12)
    yield use("batchnorm3d", lambda: nn.BatchNorm3d(2), (2, 1, 2, 2), 8)
    yield use("layernorm", lambda: nn.LayerNorm(4), (4,), 4)
    yield use("layernorm-shared", lambda: nn.LayerNorm(4), (3, 4), 12)
    yield use("layernorm-two-axes", lambda: nn.LayerNorm((2, 3)), (2, 2, 3), 12)
    yield use("layernorm-no-bias", lambda: nn.LayerNorm(4, bias=False), (4,), 4)
    yield use("groupnorm", lambda: nn.GroupNorm(2, 4), (4, 2), 8)
    yield use("groupnorm-2d", lambda: nn.GroupNorm(1, 2), (2, 2, 2), 8)
    yield use("groupnorm-features", lambda: nn.GroupNorm(2, 4), (4,), 4)
    yield use("instancenorm1d", lambda: nn.InstanceNorm1d(2, affine=True), (2, 4), 8)
    yield use("instancenorm2d", lambda: nn.InstanceNorm2d(2, affine=True), (2, 2, 3), 12)
    yield use("instancenorm3d", lambda: nn.InstanceNorm3d(2, affine=True), (2, 1, 2, 2), 8)
    if not INSTANCE_NORM_WRITES:
        yield use(
            "instancenorm2d-running",
            lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
            (2, 2, 3),
            12,
        )
    yield use("rmsnorm", lambda: nn.RMSNorm(4), (2, 4), 8)
    yield use("rmsnorm-two-axes", lambda: nn.RMSNorm((2, 3), eps=1e-3), (2, 2, 3), 12)
    yield raw(
        "rmsnorm-by-hand",
        lambda m, x: m.w * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)),
        (2, 4),
        8,
        {"w": (4,)},
    )
    yield raw(
        "layernorm-function",
        lambda m, x: F.layer_norm(x, (4,), weight=m.w, bias=m.b),
        (4,),
        4,
        {"w": (4,), "b": (4,)},
    )
