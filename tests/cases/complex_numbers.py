"""Cases with complex activations that meet real parameters, or complex tensors made of these."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases.building import VW3, W3, raw
from tests.cases.case import Case

FILTER = {"v": (4, 4), "w": (3,)}


def spectrum(x: Tensor) -> Tensor:
    """Complex numbers ``[..., 3]`` of four real ones."""
    return torch.fft.rfft(x)


def signal(h: Tensor) -> Tensor:
    """The inverse of ``spectrum``."""
    return torch.fft.irfft(h, n=4)


def parts(h: Tensor) -> Tensor:
    """Real and imaginary parts side by side."""
    return torch.view_as_real(h).flatten(1)


def cases() -> Iterator[Case]:
    yield raw("fourier-filter", lambda m, x: signal(spectrum(x @ m.v) * m.w), (4,), 4, FILTER)
    yield raw("fourier-filter-first", lambda m, x: signal(m.w * spectrum(x)), (4,), 4, W3)
    yield raw("fourier-shift", lambda m, x: signal(spectrum(x @ m.v) + m.w), (4,), 4, FILTER)
    yield raw("fourier-difference", lambda m, x: parts(torch.sub(spectrum(x), m.w)), (4,), 6, W3)
    yield raw("fourier-in-place", lambda m, x: parts(spectrum(x).mul_(m.w)), (4,), 6, W3)
    yield raw("fourier-quotient", lambda m, x: parts(spectrum(x) / (2 + m.w)), (4,), 6, W3)
    yield raw(
        "complex-rotation",
        lambda m, x: parts(torch.polar(x.square() + 1, x @ m.v) * m.w),
        (3,),
        6,
        {"v": (3, 3), "w": (3,)},
    )
    yield raw("complex-polar-angle", lambda m, x: parts(torch.polar(x.exp(), m.w.expand_as(x))), (3,), 6, W3)
    yield raw("complex-of-two", lambda m, x: parts(torch.complex(x * m.v, m.w.expand_as(x))), (3,), 6, VW3)
    yield raw(
        "complex-concatenation",
        lambda m, x: parts(torch.cat([m.w.expand(len(x), 3), spectrum(x)], 1)),
        (4,),
        12,
        W3,
    )
    yield raw("complex-matmul", lambda m, x: parts(spectrum(x) @ (m.w * (1 + 0.5j))), (4,), 4, {"w": (3, 2)})
    yield raw(
        "complex-linear",
        lambda m, x: parts(F.linear(spectrum(x), m.w.to(x.dtype.to_complex()))),
        (4,),
        4,
        {"w": (2, 3)},
    )
    yield raw(
        "complex-convolution",
        lambda m, x: parts(F.conv1d(spectrum(x), m.w.to(x.dtype.to_complex())).flatten(1)),
        (2, 4),
        4,
        {"w": (1, 2, 2)},
    )
    yield raw(
        "complex-weight",
        lambda m, x: signal(spectrum(x) * torch.view_as_complex(m.w)),
        (4,),
        4,
        {"w": (3, 2)},
    )
    yield raw(
        "real-and-complex-uses",
        lambda m, x: signal(spectrum(x @ m.v) * m.w) @ m.v + m.w.sum() * x,
        (4,),
        4,
        FILTER,
    )
    yield raw("complex-modulus", lambda m, x: (spectrum(x @ m.v) * m.w).abs(), (4,), 3, FILTER)
    yield raw("complex-square", lambda m, x: parts((spectrum(x @ m.v) * m.w).square()), (4,), 6, FILTER)
    yield raw("complex-tanh", lambda m, x: parts(torch.tanh(0.1 * spectrum(x @ m.v) + m.w)), (4,), 6, FILTER)
    yield raw(
        "complex-power-spectrum",
        lambda m, x: (lambda h: (h * h.conj()).real)(spectrum(x @ m.v) + m.w),
        (4,),
        3,
        FILTER,
    )
