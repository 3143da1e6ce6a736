"""Cases about matrix products and contractions: linear layers, matmul, einsum, bilinear maps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from tests.cases.building import SMOKE, W3, W34, classes, raw, regression, use
from tests.cases.case import Case
from tests.cases.models.wrapping import Apply


def cases() -> Iterator[Case]:
    yield use("linear-2d", lambda: nn.Linear(3, 4), (3,), 4)
    yield use("linear-3d", lambda: nn.Linear(3, 2), (4, 3), 8)
    yield use("linear-3d-square", lambda: nn.Linear(3, 3), (3, 3), 9)  # every axis as long as N
    yield use("linear-4d", lambda: nn.Linear(2, 2), (2, 3, 2), 12)
    yield use("linear-no-bias", lambda: nn.Linear(3, 4, bias=False), (3,), 4)
    yield use("linear-one-feature", lambda: nn.Linear(1, 2), (1,), 2)
    yield Case("linear-alone", lambda: nn.Linear(3, 2), nn.MSELoss, regression((3,), (2,)), tags=SMOKE)
    yield Case(
        "linear-deep",
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 3)),
        nn.CrossEntropyLoss,
        classes((3,), 3),
        tags=SMOKE,
    )
    yield raw("matmul-x-w", lambda m, x: x @ m.w, (3,), 4, {"w": (3, 4)})
    yield raw("matmul-x-wt", lambda m, x: x @ m.w.t(), (3,), 4, {"w": (4, 3)})
    yield raw("matmul-x-wT-3d", lambda m, x: x @ m.w.T, (2, 3), 8, {"w": (4, 3)})
    yield raw("matmul-x-mT", lambda m, x: torch.matmul(x, m.w.mT), (3,), 4, {"w": (4, 3)})
    yield raw("matmul-w-x", lambda m, x: m.w @ x, (3, 2), 8, {"w": (4, 3)})
    yield raw("matmul-w-xt", lambda m, x: (m.w @ x.t()).t(), (3,), 4, {"w": (4, 3)})
    yield raw("matmul-w-xt-square", lambda m, x: (m.w @ x.t()).t(), (3,), 3, {"w": (3, 3)})
    yield raw("matmul-vector", lambda m, x: (x @ m.w).unsqueeze(1), (3,), 1, {"w": (3,)})
    yield raw("matmul-vector-x", lambda m, x: m.w @ x, (3, 2), 2, {"w": (3,)})
    yield raw(
        "matmul-heads", lambda m, x: x.unsqueeze(1) @ m.w, (2, 3), 8, {"w": (2, 3, 2)}
    )  # [N, 1, s, i] @ [h, i, o]
    yield raw("mm", lambda m, x: torch.mm(x, m.w), (3,), 4, {"w": (3, 4)})
    yield raw("mm-keyword", lambda m, x: torch.mm(input=x, mat2=m.w), (3,), 4, {"w": (3, 4)})
    yield raw("mv", lambda m, x: torch.mv(x, m.w).unsqueeze(1), (3,), 1, {"w": (3,)})
    yield raw("addmm", lambda m, x: torch.addmm(m.b, x, m.w), (3,), 4, {"w": (3, 4), "b": (4,)})
    yield raw(
        "addmm-scaled",
        lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=2.0),
        (3,),
        4,
        {"w": (3, 4), "b": (4,)},
    )
    yield raw("einsum-ni-io-no", lambda m, x: torch.einsum("ni,io->no", x, m.w), (3,), 4, W34)
    yield raw("einsum-implicit", lambda m, x: torch.einsum("ni,io", x, m.w), (3,), 4, W34)
    yield raw("einsum-broadcast-input", lambda m, x: torch.einsum("ni,io->no", x, m.w), (1,), 4, W34)
    yield raw("einsum-broadcast-computed", lambda m, x: torch.einsum("ni,io", x, m.w.tanh()), (1,), 4, W34)
    yield raw("einsum-weight-first", lambda m, x: torch.einsum("io,ni->no", m.w, x), (3,), 4, W34)
    yield raw("einsum-shared", lambda m, x: torch.einsum("nsi,oi->nso", x, m.w), (2, 3), 8, {"w": (4, 3)})
    yield raw(
        "einsum-heads",
        lambda m, x: torch.einsum("nsi,hid->nhsd", x, m.w),
        (2, 3),
        8,
        {"w": (2, 3, 2)},
    )
    yield raw(
        "einsum-two-fan-in-axes",
        lambda m, x: torch.einsum("nshd,hdo->nso", x, m.w),
        (2, 2, 3),
        4,
        {"w": (2, 3, 2)},
    )
    yield raw("einsum-scale", lambda m, x: torch.einsum("ni,i->ni", x, m.w), (3,), 3, {"w": (3,)})
    yield raw("einsum-inner", lambda m, x: torch.einsum("ni,i->n", x, m.w)[:, None], (3,), 1, W3)
    yield raw("einsum-sample-last", lambda m, x: torch.einsum("io,ni->on", m.w, x).t(), (3,), 4, W34)
    yield raw(
        "einsum-two-parameters",
        lambda m, x: torch.einsum("ni,ir,ro->no", x, m.a, m.b),
        (3,),
        4,
        {"a": (3, 2), "b": (2, 4)},
    )
    yield raw("einsum-ellipsis", lambda m, x: torch.einsum("...i,io->...o", x, m.w), (2, 3), 8, W34)
    yield raw(
        "einsum-diagonal",
        lambda m, x: torch.einsum("nij,ij->n", x, m.w)[:, None],
        (2, 3),
        1,
        {"w": (2, 3)},
    )
    yield raw(
        "einsum-quadratic",
        lambda m, x: torch.einsum("ni,oij,nj->no", x, m.w, x),
        (3,),
        2,
        {"w": (2, 3, 3)},
    )
    yield raw(
        "bmm-heads-first",
        lambda m, x: torch.bmm(x.transpose(0, 1), m.w).transpose(0, 1),
        (2, 3),
        4,
        {"w": (2, 3, 2)},
    )  # [h, N, i] @ [h, i, o]
    yield raw(
        "baddbmm-heads-first",
        lambda m, x: torch.baddbmm(m.b, x.transpose(0, 1), m.w).transpose(0, 1),
        (2, 3),
        4,
        {"w": (2, 3, 2), "b": (2, 1, 2)},
    )
    yield raw(
        "bmm-expanded",
        lambda m, x: torch.bmm(x, m.w.expand(x.shape[0], -1, -1)),
        (2, 3),
        8,
        W34,
    )
    yield raw("tensordot", lambda m, x: torch.tensordot(x, m.w, dims=([2], [0])), (2, 3), 8, W34)
    yield raw("inner", lambda m, x: torch.inner(x, m.w), (3,), 4, {"w": (4, 3)})
    yield raw(
        "linear-function",
        lambda m, x: F.linear(x, m.w, m.b),
        (3,),
        4,
        {"w": (4, 3), "b": (4,)},
    )
    yield raw(
        "linear-function-keyword",
        lambda m, x: F.linear(bias=m.b, weight=m.w, input=x),
        (3,),
        4,
        {"w": (4, 3), "b": (4,)},
    )
    yield raw("linear-parameter-as-input", lambda m, x: F.linear(m.w, x).t(), (3,), 4, {"w": (4, 3)})
    yield use(
        "bilinear",
        lambda: Apply(lambda m, x: m.layer(x[:, :2], x[:, 2:]), layer=nn.Bilinear(2, 3, 2)),
        (5,),
        2,
    )
    yield use(
        "bilinear-shared-same-input",
        lambda: Apply(lambda m, x: m.layer(x, x), layer=nn.Bilinear(2, 2, 2, bias=False)),
        (3, 2),
        6,
    )
