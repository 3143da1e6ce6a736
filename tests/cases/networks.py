"""Cases about networks: residual ones, attention, samples on other axes, recurrent ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from tests.cases.building import SMOKE, classes, tokens, use
from tests.cases.case import Case, along
from tests.cases.models.attention import (
    Attention,
    FlashAttention,
    LearnedQueries,
    LibraryAttention,
    TimeFirst,
    VisionTransformer,
    Windows,
)
from tests.cases.models.convolutional import ResNet
from tests.cases.models.experts import Assigned, GroupedInDouble, LastToken, Mixture, Sorted, Tables
from tests.cases.models.recurrent import (
    CellStates,
    InitialState,
    Recurrent,
    cell_loop,
    every_output,
    last_step,
    tied_layers,
)
from tests.cases.models.wrapping import Apply


def _steps(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, 2), torch.randn(n, 3)


EXPERTS = {
    "loop": Mixture,
    "assigned": Assigned,
    "sorted": Sorted,
    "tables": Tables,
    "grouped": GroupedInDouble,
}


def _last_token(mixture: Callable[[], nn.Module]) -> nn.Module:
    return LastToken(mixture())


def cases() -> Iterator[Case]:
    yield Case("resnet", ResNet, nn.CrossEntropyLoss, classes((1, 4, 4), 3), tags=SMOKE)
    for name, attention in (
        ("hand-written", Attention),
        ("scaled-dot-product", FlashAttention),
        ("library", LibraryAttention),
        ("library-batch-second", lambda width, heads: LibraryAttention(width, heads, False)),
    ):
        yield Case(
            f"vision-transformer-{name}",
            partial(VisionTransformer, attention),
            nn.CrossEntropyLoss,
            classes((1, 4, 4), 3),
            tags=SMOKE if name == "hand-written" else frozenset(),
        )
    yield Case(
        "learned-queries",
        LearnedQueries,
        nn.CrossEntropyLoss,
        classes((3, 2), 3),
        dense=("query.weight",),
    )
    yield use(
        "attention-bias-kv",
        lambda: Apply(
            lambda m, x: m.a(x, x, x)[0],
            a=nn.MultiheadAttention(2, 1, add_bias_kv=True, add_zero_attn=True, batch_first=True),
        ),
        (3, 2),
        6,
    )
    yield use(
        "attention-cross-with-masks",
        lambda: Apply(
            lambda m, x: m.a(
                x[:, :2, :2],
                x[:, :, 1:],
                x,
                key_padding_mask=x[:, :, 0] > 0.8,
                attn_mask=torch.tensor([[False, False, True], [False, False, False]], device=x.device),
            )[0],
            a=nn.MultiheadAttention(2, 2, kdim=2, vdim=3, batch_first=True),
        ),
        (3, 3),
        4,
    )
    yield use(
        "attention-weights-of-heads",
        lambda: Apply(
            lambda m, x: torch.cat([part.flatten(1) for part in m.a(x, x, x, average_attn_weights=False)], 1),
            a=nn.MultiheadAttention(4, 2, bias=False, batch_first=True),
        ),
        (2, 4),
        16,
    )
    yield use(
        "attention-time-first-bias-kv",
        lambda: Apply(
            lambda m, x: m.a(x[:, :2].transpose(0, 1), *[x.transpose(0, 1)] * 2)[0].transpose(0, 1),
            a=nn.MultiheadAttention(2, 2, add_bias_kv=True),
        ),
        (3, 2),
        4,
    )
    yield use(
        "attention-causal",
        lambda: Apply(
            lambda m, x: m.a(
                *[x] * 3,
                need_weights=False,
                attn_mask=nn.Transformer.generate_square_subsequent_mask(3, dtype=x.dtype),
                is_causal=True,
            )[0],
            a=nn.MultiheadAttention(2, 1, batch_first=True),
        ),
        (3, 2),
        6,
    )
    yield use(
        "transformer-decoder-layer",
        lambda: Apply(
            lambda m, x: m.a(x[:, :2], x),
            a=nn.TransformerDecoderLayer(2, 1, 2, dropout=0.0, batch_first=True),
        ),
        (3, 2),
        4,
    )
    yield use(
        "transformer-encoder-layer",
        lambda: nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True),
        (3, 4),
        12,
    )
    yield use(
        "transformer-encoder-decoder",
        lambda: Apply(
            lambda m, x: m.a(x[:, :2], x[:, 1:], tgt_is_causal=False),
            a=nn.Transformer(2, 1, 1, 1, 2, dropout=0.0, batch_first=True),
        ),
        (3, 2),
        4,
    )
    for name, mixture in EXPERTS.items():
        yield use(f"experts-{name}", mixture, (4, 3), 12)
        yield Case(
            f"experts-{name}-last-token",
            partial(_last_token, mixture),
            nn.CrossEntropyLoss,
            tokens((4,), 7, 3),
        )
    yield Case("windows", Windows, nn.CrossEntropyLoss, classes((4, 4, 2), 3))
    yield Case("time-first-inside", TimeFirst, nn.CrossEntropyLoss, classes((3, 3), 3))
    yield Case(
        "time-first-input",
        lambda: Apply(
            lambda m, x: m.head(torch.tanh(m.layer(x)).mean(0)),
            layer=nn.Linear(2, 3),
            head=nn.Linear(3, 3),
        ),
        nn.CrossEntropyLoss,
        lambda n: (torch.randn(3, n, 2), torch.randint(3, (n,))),
        take_input=along(1),
    )
    yield Case(
        "flattened-inside",
        lambda: Apply(
            lambda m, x: m.head(torch.tanh(m.layer(x.reshape(-1, 2))).view(x.shape[0], -1)),
            layer=nn.Linear(2, 2),
            head=nn.Linear(6, 3),
        ),
        nn.CrossEntropyLoss,
        classes((3, 2), 3),
    )
    yield Case(
        "flattened-inside-then-position-bias",
        lambda: Apply(
            lambda m, x: m.head((m.layer(x.reshape(-1, 3)).view(-1, 3, 3) * m.scale(x)).mean(1)),
            layer=nn.Linear(3, 3),
            scale=nn.Linear(3, 3),
            head=nn.Linear(3, 3),
        ),
        nn.CrossEntropyLoss,
        classes((3, 3), 3),
    )
    for layer in (nn.RNN, nn.GRU, nn.LSTM):
        yield Case(
            layer.__name__.lower(),
            partial(last_step, layer),
            nn.CrossEntropyLoss,
            classes((3, 2), 3),
        )
    yield Case("rnn-relu", partial(last_step, partial(nn.RNN, nonlinearity="relu")), nn.MSELoss, _steps)
    yield Case(
        "lstm-time-first",
        lambda: Recurrent(nn.LSTM(2, 2), 2),
        nn.CrossEntropyLoss,
        lambda n: (torch.randn(3, n, 2), torch.randint(3, (n,))),
        take_input=along(1),
    )
    yield Case(
        "gru-two-layers-both-directions",
        lambda: Recurrent(nn.GRU(2, 1, num_layers=2, bidirectional=True, batch_first=True), 4, final=True),
        nn.CrossEntropyLoss,
        classes((3, 2), 3),
    )
    yield Case(
        "lstm-final-state-given-initial-state",
        lambda: Apply(
            lambda m, x, h, c: m.recurrent(x, (h.transpose(0, 1), c.transpose(0, 1))),
            recurrent=Recurrent(nn.LSTM(2, 2, batch_first=True), 2, final=True),
        ),
        nn.CrossEntropyLoss,
        lambda n: (
            (torch.randn(n, 2, 2), torch.randn(n, 1, 2), torch.randn(n, 1, 2)),
            torch.randint(3, (n,)),
        ),
    )
    yield Case(
        "lstm-projected-two-layers-both-directions",
        lambda: Recurrent(
            nn.LSTM(2, 2, num_layers=2, bidirectional=True, proj_size=1, batch_first=True), 4, final=True
        ),
        nn.CrossEntropyLoss,
        classes((2, 2), 3),
    )
    yield use("lstm-every-output", lambda: Apply(every_output, layer=nn.LSTM(2, 2, bias=False)), (3, 2), 10)
    yield use(
        "lstm-memory",
        lambda: Apply(lambda m, x: m.layer(x)[1][1][0], layer=nn.LSTM(2, 2, batch_first=True)),
        (3, 2),
        2,
    )
    yield use(
        "rnn-tied-layers", lambda: Apply(lambda m, x: m.layer(x)[0][:, -1], layer=tied_layers()), (3, 2), 2
    )
    yield use(
        "gru-rows-folded",
        lambda: Apply(
            lambda m, x: m.layer(x.reshape(-1, 2, 2))[0][:, -1].reshape(x.shape[0], -1),
            layer=nn.GRU(2, 2, batch_first=True),
        ),
        (3, 2, 2),
        6,
    )
    yield use(
        "rnn-relu-cell-loop", lambda: Apply(cell_loop, cell=nn.RNNCell(2, 2, nonlinearity="relu")), (3, 2), 2
    )
    yield use("lstm-cell-trained-states", CellStates, (2,), 4)
    yield Case("gru-trained-initial-state", InitialState, nn.CrossEntropyLoss, classes((2, 2), 3))
    for cell in (nn.RNNCell, nn.LSTMCell, nn.GRUCell):
        yield use(
            f"{cell.__name__.removesuffix('Cell').lower()}-cell-loop",
            lambda cell=cell: Apply(cell_loop, cell=cell(2, 2)),
            (3, 2),
            2,
        )
