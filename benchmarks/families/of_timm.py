"""Families of timm: the small models that it has for tests, and some others with few channels."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from benchmarks.families.family import Family, first_tensor, pixels

SMALL: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": dict(img_size=16, patch_size=4, embed_dim=8, depth=2, num_heads=2),
    "deit_tiny_distilled_patch16_224": dict(img_size=16, patch_size=4, embed_dim=8, depth=2, num_heads=2),
    "beit_base_patch16_224": dict(img_size=16, patch_size=4, embed_dim=8, depth=2, num_heads=2),
    "eva02_tiny_patch14_224": dict(img_size=16, patch_size=4, embed_dim=8, depth=2, num_heads=2),
    "cait_xxs24_224": dict(img_size=16, patch_size=4, embed_dim=8, depth=2, num_heads=2),
    "xcit_nano_12_p8_224": dict(img_size=32, embed_dim=8, depth=2, num_heads=2),
    "convnext_atto": dict(depths=(1, 1, 1, 1), dims=(4, 4, 8, 8)),
    "convnextv2_atto": dict(depths=(1, 1, 1, 1), dims=(4, 4, 8, 8)),
    "swin_tiny_patch4_window7_224": dict(
        img_size=16, patch_size=2, embed_dim=4, depths=(1, 1), num_heads=(1, 2)
    )
    | dict(window_size=2),
    "pvt_v2_b0": dict(depths=(1, 1, 1, 1), embed_dims=(4, 4, 8, 8), num_heads=(1, 1, 2, 2)),
    "tnt_s_patch16_224": dict(img_size=16, patch_size=8, embed_dim=8, inner_dim=4, depth=2, num_heads_outer=2)
    | dict(num_heads_inner=2),
    "resnet10t": dict(channels=(4, 4, 8, 8), stem_width=4),
    "edgenext_xx_small": dict(depths=(1, 1, 1, 1), dims=(4, 8, 8, 8), heads=(2, 2, 2, 2)),
}


def named(name: str, options: dict[str, Any]) -> nn.Module:
    """A model of a given name with random weights."""
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=3, **options)
    size = sum(p.numel() for p in model.parameters())
    if size > 1_000_000:
        raise ValueError(f"{size} parameters")
    return model


def families() -> Iterator[Family]:
    """All that are listed here, and those that timm has for tests."""
    import timm

    for name, options in SMALL.items():
        size = options.get("img_size", 32)
        yield Family("timm", name, functools.partial(named, name, options), pixels(size, "x"), first_tensor)
    for name in timm.list_models("test_*"):
        options = {"img_size": 32} if "vit" in name or "coat" in name else {}
        yield Family("timm", name, functools.partial(named, name, options), pixels(32, "x"), first_tensor)
