"""Cases about raw parameters: added, multiplied, indexed, derived from others, used in any torch function."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases.building import FALLBACK, LOW_RANK, VW3, W2, W3, W23, W25, W34, W232, raw, tokens, use
from tests.cases.case import Case
from tests.cases.models.functions import Square, Wave
from tests.cases.models.in_place import assign_slice, in_place, in_place_operator, masked_in_place


def cases() -> Iterator[Case]:
    yield use("prelu-one", lambda: nn.PReLU(), (4,), 4)
    yield use("prelu-channels", lambda: nn.PReLU(3), (3, 2), 6)
    yield use("prelu-channels-features", lambda: nn.PReLU(3), (3,), 3)
    yield raw("add", lambda m, x: x + m.w, (3,), 3, W3)
    yield raw("add-scalar", lambda m, x: x + m.w, (3,), 3, {"w": ()})
    yield raw("add-leading-one", lambda m, x: x + m.w, (2, 3), 6, {"w": (1, 2, 3)})
    yield raw("add-inner-one", lambda m, x: x + m.w, (2, 3), 6, {"w": (2, 1)})
    yield raw("add-square", lambda m, x: x + m.w, (3, 3), 9, {"w": (3, 3)})
    yield raw("add-grows-input", lambda m, x: x + m.w, (1, 3), 6, {"w": (2, 1)})
    yield raw("add-alpha", lambda m, x: torch.add(input=x, other=m.w, alpha=2.0), (3,), 3, W3)
    yield raw("add-reversed", lambda m, x: m.w + x, (3,), 3, W3)
    yield raw("subtract", lambda m, x: x - m.w, (3,), 3, W3)
    yield raw("subtract-reversed", lambda m, x: m.w - x, (3,), 3, W3)
    yield raw("rsub", lambda m, x: torch.rsub(x, m.w), (3,), 3, W3)
    yield raw("multiply", lambda m, x: x * m.w, (3,), 3, W3)
    yield raw("multiply-scalar", lambda m, x: m.w * x, (3,), 3, {"w": ()})
    yield raw("multiply-channels", lambda m, x: x * m.w[:, None], (2, 3), 6, {"w": (2,)})
    yield raw("multiply-grows-input", lambda m, x: x * m.w, (1, 3), 6, {"w": (2, 3)})
    yield raw("divide", lambda m, x: x / (2 + m.w), (3,), 3, W3)
    yield raw("divide-direct", lambda m, x: x / m.w, (3,), 3, W3)
    yield raw("divide-reversed", lambda m, x: m.w / (2 + x.square()), (3,), 3, W3)
    yield raw("divide-numerator", lambda m, x: m.w / (2 + x.square()), (2, 3), 6, {"w": (2, 1)})
    yield raw("power", lambda m, x: (1 + x.square()) ** m.w, (3,), 3, W3)
    yield raw("affine", lambda m, x: x * m.w + m.b, (3,), 3, {"w": (3,), "b": (3,)})
    yield raw("addcmul", lambda m, x: torch.addcmul(m.b, x, m.w), (3,), 3, {"w": (3,), "b": (3,)})
    yield raw("lerp", lambda m, x: torch.lerp(x, m.w, 0.3), (3,), 3, W3)
    yield raw("maximum", lambda m, x: torch.maximum(x, m.w), (3,), 3, W3)
    yield raw("clamp", lambda m, x: torch.clamp(x, min=m.w), (3,), 3, W3)
    yield raw("where", lambda m, x: torch.where(x > 0, x, m.w), (3,), 3, W3)
    yield raw("where-two", lambda m, x: torch.where(x > 0, m.v * x, m.w), (3,), 3, VW3)
    yield raw("where-scalar", lambda m, x: torch.where(x > 0, m.w, 0.0), (3,), 3, {"w": ()})
    yield raw("index-integer", lambda m, x: x * m.w[1], (3,), 3, {"w": (2, 3)})
    yield raw("index-slice", lambda m, x: x + m.w[1:4], (3,), 3, {"w": (5,)})
    yield raw("index-ellipsis", lambda m, x: x + m.w[..., ::2], (3,), 3, {"w": (1, 5)})
    yield raw("index-list", lambda m, x: x + m.w[[0, 2, 0]], (3,), 3, W3)
    yield raw("index-twice", lambda m, x: x * m.w[0] + m.w[1], (3,), 3, {"w": (2, 3)})
    yield raw("select-narrow", lambda m, x: x * m.w.select(0, 1).narrow(0, 1, 3), (3,), 3, W25)
    yield raw("unbind", lambda m, x: x * m.w.unbind(0)[0] - m.w.unbind(0)[1], (3,), 3, W23)
    yield raw("chunk", lambda m, x: x * m.w.chunk(2)[0] + m.w.chunk(2)[1], (3,), 3, {"w": (6,)})
    yield raw("view", lambda m, x: x @ m.w.view(3, 2), (3,), 2, {"w": (6,)})
    yield raw("reshape-permute", lambda m, x: x @ m.w.permute(1, 0, 2).reshape(3, 4), (3,), 4, W232)
    yield raw("unsqueeze", lambda m, x: x + m.w.unsqueeze(0), (3,), 3, W3)
    yield raw("expand-as", lambda m, x: x * m.w.expand_as(x), (3,), 3, W3)
    yield raw("expand-add", lambda m, x: m.w.expand(x.shape[0], -1) + x, (3,), 3, W3)
    yield raw("broadcast-to", lambda m, x: torch.broadcast_to(m.w, x.shape) * x, (3,), 3, W3)
    yield raw("repeat", lambda m, x: m.w.repeat(x.shape[0], 1) * x, (3,), 3, W3)
    yield raw("tile-inside", lambda m, x: m.w.tile(2) * x, (4,), 4, {"w": (2,)})
    yield raw("repeat-interleave", lambda m, x: m.w.repeat_interleave(2) * x, (4,), 4, W2)
    yield raw(
        "class-token",
        lambda m, x: torch.cat([m.w.expand(x.shape[0], -1, -1), x], dim=1),
        (2, 3),
        9,
        {"w": (1, 1, 3)},
    )
    yield raw(
        "class-token-through-layer",
        lambda m, x: torch.cat((m.w.expand(len(x), 1, 3), x), 1) @ m.v,
        (2, 3),
        6,
        {"w": (1, 1, 3), "v": (3, 2)},
    )
    yield raw(
        "stack",
        lambda m, x: torch.stack([m.w.expand_as(x), x, m.w * x], dim=1),
        (3,),
        9,
        W3,
    )
    yield raw("cat-parameters", lambda m, x: x * torch.cat([m.v, m.w]), (6,), 6, VW3)
    yield raw("stack-parameters", lambda m, x: x @ torch.stack([m.v, m.w], 1), (3,), 2, VW3)
    yield raw("position-slice", lambda m, x: x + m.w[:, : x.shape[1]], (2, 3), 6, {"w": (1, 4, 3)})
    yield raw(
        "position-interpolated",
        lambda m, x: x + F.interpolate(m.w, size=x.shape[-1], mode="linear"),
        (2, 4),
        8,
        {"w": (1, 2, 3)},
    )
    yield raw("pad", lambda m, x: x + F.pad(m.w, (1, 1)), (4,), 4, {"w": (2,)})
    yield raw("function-of-parameter", lambda m, x: x * torch.sigmoid(m.w).exp(), (3,), 3, W3)
    yield raw("softmax-of-parameter", lambda m, x: x * F.softmax(m.w, 0), (3,), 3, W3)
    yield raw("norm-of-parameter", lambda m, x: x * m.w / m.w.norm(), (3,), 3, W3)
    yield raw("product-of-parameters", lambda m, x: x @ (m.a @ m.b), (3,), 3, LOW_RANK)
    yield raw(
        "low-rank-update",
        lambda m, x: F.linear(x, m.w + 0.5 * m.b @ m.a),
        (3,),
        2,
        {"w": (2, 3), "a": (1, 3), "b": (2, 1)},
    )
    yield raw("sum-of-parameter", lambda m, x: x * m.w.sum(), (3,), 3, W3)
    yield raw("used-twice-differently", lambda m, x: torch.tanh(x @ m.w) @ m.w.T, (3,), 3, W34)
    yield raw("squared-use", lambda m, x: m.w * (m.w * x), (3,), 3, W3)
    yield raw("scale-and-matmul", lambda m, x: (x * m.w.diagonal()) @ m.w, (3,), 3, {"w": (3, 3)})
    yield raw("assign-slice", assign_slice, (3,), 4, {"w": ()})
    yield raw("in-place-add", lambda m, x: in_place(x * 2, "add_", m.w), (3,), 3, W3)
    yield raw("in-place-multiply", lambda m, x: in_place(x * 2, "mul_", m.w), (3,), 3, W3)
    yield raw("in-place-power", lambda m, x: in_place(1 + x.square(), "pow_", m.w), (3,), 3, W3)
    yield raw("in-place-operator", in_place_operator, (3,), 3, VW3)
    yield raw("to-and-contiguous", lambda m, x: x @ m.w.t().contiguous().clone(), (3,), 2, W23)
    yield raw("index-second-axis", lambda m, x: x + m.w[:, [2, 0, 2]].sum(0), (3,), 3, W34)
    yield raw(
        "index-by-two-inputs",
        lambda m, ids: m.w[ids, ids.flip(1)],
        (),
        3,
        {"w": (4, 4)},
        data=tokens((3,), 4, 3),
    )
    yield raw("masked-in-place", masked_in_place, (3,), 4, W34)
    yield raw(
        "normalised-weight",
        lambda m, x: F.linear(F.normalize(x), F.normalize(m.w)),
        (3,),
        2,
        W23,
    )
    yield raw("derived-used-twice", _derived_twice, (3,), 3, W3)
    yield raw("derived-in-two-steps", lambda m, x: x * (s := m.w.exp()) + (s * m.v).sum(), (3,), 3, VW3)
    yield raw("cdist", lambda m, x: torch.cdist(x, m.w), (2, 3), 8, {"w": (4, 3)}, tags=FALLBACK)
    yield raw(
        "cosine-similarity",
        lambda m, x: F.cosine_similarity(x[:, None], m.w[None], dim=-1),
        (3,),
        2,
        {"w": (2, 3)},
        tags=FALLBACK,
    )
    yield raw(
        "fft",
        lambda m, x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(m.w), n=4),
        (4,),
        4,
        {"w": (4,)},
        tags=FALLBACK,
    )
    yield raw(
        "solve",
        lambda m, x: torch.linalg.solve(
            m.w + 4 * torch.eye(3, dtype=x.dtype, device=x.device), x.unsqueeze(-1)
        ),
        (3,),
        3,
        {"w": (3, 3)},
        tags=FALLBACK,
    )
    yield raw(
        "grid-sample",
        lambda m, x: F.grid_sample(x, torch.tanh(m.w).expand(x.shape[0], -1, -1, -1), align_corners=False),
        (1, 3, 3),
        4,
        {"w": (1, 2, 2, 2)},
        tags=FALLBACK,
    )
    yield raw("logaddexp", lambda m, x: torch.logaddexp(x, m.w), (3,), 3, W3, tags=FALLBACK)
    yield raw(
        "custom-function-without-parameters",
        lambda m, x: Square.apply(x @ m.w),
        (3,),
        4,
        W34,
    )
    yield raw(
        "custom-function-consuming-parameter",
        lambda m, x: Wave.apply(x, m.w),
        (3,),
        3,
        W3,
    )


def _derived_twice(m: nn.Module, x: Tensor) -> Tensor:
    positive = F.softplus(m.get_parameter("w"))
    return torch.tanh(x * positive) + positive
