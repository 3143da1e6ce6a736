"""Cases about tables that rows are looked up in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases.building import SMOKE, W42, raw, tokens, use
from tests.cases.case import Case
from tests.cases.models.parametrised import ShiftedEmbedding
from tests.cases.models.wrapping import Apply


def cases() -> Iterator[Case]:
    def bag(name: str, layer: Callable[[], nn.Module], **options: Any) -> Case:
        options.setdefault("data", tokens((3,), 4, 3))
        return use(name, layer, (), 2, **options)

    def offsets(n: int) -> tuple[Any, Tensor]:
        lengths = torch.arange(n) % 3 + 1
        starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
        return (torch.randint(4, (int(lengths.sum()),)), starts), torch.randint(3, (n,))

    def weighted_offsets(n: int) -> tuple[Any, Tensor]:
        (ids, starts), target = offsets(n)
        return (ids, starts, torch.rand(ids.shape[0])), target

    def take_bag(inputs: Any, n: int) -> Any:
        ids, starts, *rest = inputs
        end = starts[n + 1] if n + 1 < len(starts) else len(ids)
        return (
            ids[starts[n] : end],
            torch.zeros_like(starts[:1]),
            *(w[starts[n] : end] for w in rest),
        )

    def bags(function: Callable[..., Tensor], **options: Any) -> nn.Module:
        return Apply(
            lambda m, *x: m.head(torch.tanh(function(m, *x))),
            bag=nn.EmbeddingBag(4, 2, **options),
            head=nn.Linear(2, 3),
        )

    yield use("embedding", lambda: nn.Embedding(5, 2), (), 6, data=tokens((3,), 5, 3), tags=SMOKE)
    yield use("embedding-one-id", lambda: nn.Embedding(4, 2), (), 2, data=tokens((), 4, 3))
    yield use("embedding-grid", lambda: nn.Embedding(4, 2), (), 8, data=tokens((2, 2), 4, 3))
    yield use(
        "embedding-padding-idx",
        lambda: nn.Embedding(4, 2, padding_idx=1),
        (),
        8,
        data=tokens((4,), 4, 3),
    )
    yield use("embedding-subclass", lambda: ShiftedEmbedding(4, 2), (), 6, data=tokens((3,), 4, 3))
    yield raw(
        "embedding-function",
        lambda m, ids: F.embedding(input=ids, weight=m.w),
        (),
        6,
        {"w": (4, 2)},
        data=tokens((3,), 4, 3),
    )
    yield raw("embedding-by-index", lambda m, ids: m.w[ids], (), 6, W42, data=tokens((3,), 4, 3))
    yield raw(
        "embedding-index-select",
        lambda m, ids: torch.index_select(m.w, 0, ids.flatten()).view(ids.shape[0], -1),
        (),
        6,
        W42,
        data=tokens((3,), 4, 3),
    )
    yield raw(
        "embedding-one-hot",
        lambda m, ids: F.one_hot(ids, 4).to(m.w.dtype) @ m.w,
        (),
        6,
        W42,
        data=tokens((3,), 4, 3),
    )
    yield raw(
        "embedding-gather",
        lambda m, ids: m.w.expand(ids.shape[0], -1).gather(1, ids),
        (),
        3,
        {"w": (4,)},
        data=tokens((3,), 4, 3),
    )
    yield use(
        "embedding-positions",
        lambda: Apply(
            lambda m, ids: m.token(ids) + m.position(torch.arange(ids.shape[1], device=ids.device)),
            token=nn.Embedding(4, 2),
            position=nn.Embedding(5, 2),
        ),
        (),
        6,
        data=tokens((3,), 4, 3),
    )
    for mode in ("sum", "mean", "max"):
        yield bag(f"embedding-bag-{mode}", partial(nn.EmbeddingBag, 4, 2, mode=mode))
        yield Case(
            f"embedding-bag-offsets-{mode}",
            partial(bags, lambda m, ids, starts: m.bag(ids, starts), mode=mode),
            nn.CrossEntropyLoss,
            offsets,
            take_input=take_bag,
        )
    yield bag("embedding-bag-padding-idx", lambda: nn.EmbeddingBag(4, 2, mode="mean", padding_idx=2))
    yield Case(
        "embedding-bag-weights",
        lambda: bags(lambda m, ids, w: m.bag(ids, per_sample_weights=w), mode="sum"),
        nn.CrossEntropyLoss,
        lambda n: ((torch.randint(4, (n, 3)), torch.rand(n, 3)), torch.randint(3, (n,))),
    )
    yield Case(
        "embedding-bag-offsets-weights",
        lambda: bags(lambda m, ids, starts, w: m.bag(ids, starts, w), mode="sum"),
        nn.CrossEntropyLoss,
        weighted_offsets,
        take_input=take_bag,
    )
