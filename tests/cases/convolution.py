"""Cases about convolutions, transposed ones, and networks made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from tests.cases.building import SMOKE, classes, raw, regression, use
from tests.cases.case import Case
from tests.cases.models.wrapping import Apply


def cases() -> Iterator[Case]:
    def conv(name: str, layer: Callable[[], nn.Module], inputs: tuple[int, ...]) -> Case:
        with torch.no_grad():
            features = layer()(torch.zeros(1, *inputs)).numel()
        return use(name, layer, inputs, features)

    yield conv("conv1d", lambda: nn.Conv1d(2, 3, 3), (2, 5))
    yield conv("conv1d-stride", lambda: nn.Conv1d(2, 2, 2, stride=2, padding=1), (2, 6))
    yield conv("conv1d-dilation", lambda: nn.Conv1d(2, 2, 2, dilation=2), (2, 5))
    yield conv("conv1d-groups", lambda: nn.Conv1d(4, 2, 2, groups=2), (4, 4))
    yield conv("conv1d-same", lambda: nn.Conv1d(2, 2, 2, padding="same", dilation=3), (2, 5))
    yield conv("conv1d-valid", lambda: nn.Conv1d(2, 2, 3, padding="valid", bias=False), (2, 5))
    yield conv("conv2d", lambda: nn.Conv2d(2, 3, 2), (2, 3, 4))
    yield conv("conv2d-no-bias", lambda: nn.Conv2d(2, 2, (2, 1), bias=False), (2, 3, 3))
    yield conv(
        "conv2d-stride-padding-dilation",
        lambda: nn.Conv2d(2, 2, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
        (2, 4, 3),
    )
    yield conv("conv2d-stride-leaves-rest", lambda: nn.Conv2d(1, 2, 2, stride=3), (1, 6, 6))
    yield conv("conv2d-groups", lambda: nn.Conv2d(4, 6, 2, groups=2), (4, 3, 3))
    yield conv("conv2d-depthwise", lambda: nn.Conv2d(3, 6, 2, groups=3), (3, 3, 3))
    yield conv("conv2d-same-even", lambda: nn.Conv2d(1, 2, (2, 4), padding="same"), (1, 3, 3))
    yield conv("conv2d-one-channel", lambda: nn.Conv2d(1, 1, 3), (1, 3, 3))
    yield conv("conv3d", lambda: nn.Conv3d(2, 2, 2), (2, 2, 3, 2))
    yield conv(
        "conv3d-stride-dilation-groups",
        lambda: nn.Conv3d(2, 2, 2, stride=2, dilation=(1, 2, 1), groups=2, padding=1),
        (2, 2, 3, 2),
    )
    yield conv("conv3d-same", lambda: nn.Conv3d(1, 2, (1, 2, 3), padding="same"), (1, 2, 2, 2))
    for mode in ("reflect", "replicate", "circular"):
        yield conv(f"conv1d-{mode}", partial(nn.Conv1d, 1, 2, 3, padding=2, padding_mode=mode), (1, 4))
        yield conv(
            f"conv2d-{mode}",
            partial(nn.Conv2d, 1, 2, 3, padding=(1, 2), padding_mode=mode),
            (1, 3, 3),
        )
        yield conv(
            f"conv3d-{mode}",
            partial(nn.Conv3d, 1, 1, 2, padding=1, padding_mode=mode, stride=2),
            (1, 2, 2, 3),
        )
    yield conv(
        "conv2d-same-circular",
        lambda: nn.Conv2d(1, 2, (2, 3), padding="same", padding_mode="circular"),
        (1, 3, 3),
    )
    yield conv("convtranspose1d", lambda: nn.ConvTranspose1d(2, 3, 3), (2, 3))
    yield conv(
        "convtranspose1d-options",
        lambda: nn.ConvTranspose1d(4, 2, 3, stride=2, padding=1, output_padding=1, dilation=2, groups=2),
        (4, 3),
    )
    yield conv("convtranspose2d", lambda: nn.ConvTranspose2d(2, 3, 2), (2, 2, 2))
    yield conv(
        "convtranspose2d-options",
        lambda: nn.ConvTranspose2d(
            2, 4, (2, 3), stride=(2, 1), padding=(1, 0), output_padding=(1, 0), groups=2
        ),
        (2, 2, 3),
    )
    yield conv(
        "convtranspose2d-dilation",
        lambda: nn.ConvTranspose2d(2, 1, 2, dilation=2, stride=3, output_padding=2, bias=False),
        (2, 2, 2),
    )
    yield conv("convtranspose3d", lambda: nn.ConvTranspose3d(2, 1, 2), (2, 1, 2, 2))
    yield conv(
        "convtranspose3d-options",
        lambda: nn.ConvTranspose3d(2, 2, 2, stride=2, padding=1, output_padding=1, groups=2),
        (2, 2, 1, 2),
    )
    yield use(
        "convtranspose2d-output-size",
        lambda: Apply(lambda m, x: m.layer(x, output_size=[4, 4]), layer=nn.ConvTranspose2d(1, 1, 2, stride=2)),
        (1, 2, 2),
        16,
    )
    yield raw(
        "conv2d-function-viewed-weight",
        lambda m, x: F.conv2d(x, m.w.view(2, 1, 2, 2), m.b, stride=1),
        (1, 3, 3),
        8,
        {"w": (2, 4), "b": (2,)},
    )
    yield raw(
        "conv2d-function-keyword",
        lambda m, x: F.conv2d(weight=m.w, input=x, padding=1, dilation=2),
        (1, 3, 3),
        18,
        {"w": (2, 1, 2, 2)},
    )
    yield raw(
        "conv2d-standardised-weight",
        lambda m, x: F.conv2d(x, (m.w - m.w.mean((1, 2, 3), keepdim=True)) / m.w.std()),
        (1, 3, 3),
        8,
        {"w": (2, 1, 2, 2)},
    )
    yield Case(
        "conv2d-deep",
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2, 2, 2),
            nn.Sigmoid(),
            nn.Flatten(),
            nn.Linear(2, 3),
        ),
        nn.CrossEntropyLoss,
        classes((1, 4, 4), 3),
        tags=SMOKE,
    )
    yield Case(
        "avgpool-divisor-override",
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 2),
            nn.AvgPool2d(2, stride=1, padding=1, divisor_override=3, ceil_mode=True),
            nn.Conv2d(2, 2, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        ),
        nn.MSELoss,
        regression((1, 4, 4), (2,)),
    )
    yield Case(
        "autoencoder",
        lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Sigmoid(), nn.ConvTranspose2d(2, 1, 2), nn.Flatten()),
        nn.MSELoss,
        regression((1, 3, 3), (9,)),
        tags=SMOKE,
    )
    yield Case(
        "upsampled-map",
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 1), nn.Upsample(scale_factor=2), nn.PixelShuffle(1), nn.Conv2d(2, 2, 3)
        ),
        nn.MSELoss,
        regression((1, 2, 2), (2, 2, 2)),
    )
