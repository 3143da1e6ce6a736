"""Cases in which parameters meet other tensors by shape, type or device alone, or were expanded before."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from tests.cases.building import W2, W3, W34, raw
from tests.cases.case import Case

ONE = {"w": (1,), "b": (1,)}


def cases() -> Iterator[Case]:
    yield from _like_another()
    yield from _separate()
    yield from _constants()
    yield from _expanded()


def _like_another() -> Iterator[Case]:
    yield raw("type-as", lambda m, x: x * m.w.type_as(x), (3,), 3, W3)
    yield raw("view-as", lambda m, x: x * m.w.view_as(x[0]), (5, 4), 20, {"w": (20,)})
    yield raw("reshape-as", lambda m, x: x * m.w.t().reshape_as(x[0]), (5, 4), 20, {"w": (10, 2)})
    yield raw("to-another", lambda m, x: x * m.w.to(x), (3,), 3, W3)
    yield raw("expand-as-sample", lambda m, x: x * m.w.expand_as(x[0]), (5, 4), 20, {"w": (4,)})
    yield raw("expand-as-alone", lambda m, x: torch.sigmoid(m.w.expand_as(x)), (3,), 3, W3)
    yield raw("data-as-parameter", lambda m, x: (x @ m.w).type_as(m.w).to(m.w) @ m.w.T, (3,), 3, W34)


def _separate() -> Iterator[Case]:
    yield raw(
        "broadcast-tensors", lambda m, x: torch.mul(*torch.broadcast_tensors(x, m.w)), (5, 4), 20, {"w": (5, 1)}
    )
    yield raw("broadcast-and-stack", lambda m, x: torch.stack(torch.broadcast_tensors(m.w, x), -1), (3,), 6, W3)
    yield raw("atleast-2d", lambda m, x: torch.mul(*torch.atleast_2d(x, m.w)), (3,), 3, W3)
    yield raw(
        "meshgrid",
        lambda m, x: torch.mul(*torch.meshgrid(x.flatten(), m.w, indexing="ij")).view(len(x), -1),
        (4,),
        8,
        W2,
    )


def _constants() -> Iterator[Case]:
    yield raw("zeros-like", lambda m, x: x + (torch.zeros_like(x) + m.w), (4,), 4, {"w": (4,)})
    yield raw("zeros-like-sample", lambda m, x: x * (torch.zeros_like(x[0, 0]) + m.w), (5, 4), 20, {"w": (4,)})
    yield raw("new-ones", lambda m, x: x * (x.new_ones(4) * m.w), (5, 4), 20, {"w": (4,)})
    yield raw("full-like", lambda m, x: x * (torch.full_like(x[0, 0], 2.0) * m.w), (5, 4), 20, {"w": (4,)})
    yield raw(
        "new-ones-for-samples",
        lambda m, x: torch.cat([x, x.new_ones(len(x), 1, 1) * m.w], 1),
        (2, 4),
        12,
        {"w": (4,)},
    )


def _expanded() -> Iterator[Case]:
    yield raw(
        "expanded-linear",
        lambda m, x: F.linear(x, m.w.expand(3, 5), m.b.expand(3)),
        (5,),
        3,
        {"w": (1, 5), "b": (1,)},
    )
    yield raw("expanded-matmul", lambda m, x: x @ m.w.expand(5, 3), (5,), 3, {"w": (1, 3)})
    yield raw(
        "expanded-convolution",
        lambda m, x: F.conv1d(x, m.w.expand(2, 4, 2), m.b.expand(2)),
        (4, 5),
        8,
        {"w": (2, 1, 2), "b": (1,)},
    )
    yield raw(
        "expanded-transposed-convolution",
        lambda m, x: F.conv_transpose1d(x, m.w.expand(4, 2, 2), m.b.expand(2)),
        (4, 3),
        8,
        {"w": (1, 2, 2), "b": ()},
    )
    yield raw(
        "expanded-layer-norm", lambda m, x: F.layer_norm(x, (5,), m.w.expand(5), m.b.expand(5)), (5,), 5, ONE
    )
    yield raw(
        "expanded-group-norm", lambda m, x: F.group_norm(x, 2, m.w.expand(4), m.b.expand(4)), (4, 3), 12, ONE
    )
    yield raw(
        "expanded-instance-norm",
        lambda m, x: F.instance_norm(x, weight=m.w.expand(4), bias=m.b.expand(4)),
        (4, 3),
        12,
        ONE,
    )
    yield raw(
        "expanded-batch-norm",
        lambda m, x: F.batch_norm(x, x.new_zeros(4), x.new_ones(4), m.w.expand(4), m.b.expand(4)),
        (4, 3),
        12,
        ONE,
    )
    yield raw("expanded-prelu", lambda m, x: F.prelu(x, m.w.expand(4)), (4, 3), 12, {"w": (1,)})
    yield raw(
        "expanded-embedding",
        lambda m, x: F.embedding((x > 0).long(), m.w.expand(2, 4)),
        (3,),
        12,
        {"w": (1, 4)},
    )
