"""Families that PyTorch ships, and what people write by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.families.family import WORDS, Family, features, first_tensor, pixels, tokens
from tests.cases.models.attention import Attention, FlashAttention, VisionTransformer, Windows
from tests.cases.models.convolutional import ResNet
from tests.cases.models.experts import Assigned, LastToken, Mixture, Sorted, Tables


class LowRank(nn.Module):
    """A frozen linear layer, and a trained update of low rank."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, layer.in_features))
        self.b = nn.Parameter(torch.randn(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """The layer and the update."""
        return self.layer(x) + x @ self.a.T @ self.b.T


class Merged(LowRank):
    """The update is added to the weight."""

    def forward(self, x: Tensor) -> Tensor:
        """One product with the sum."""
        return nn.functional.linear(x, self.layer.weight + self.b @ self.a, self.layer.bias)


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(WORDS, 8), nn.Parameter(torch.randn(16, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of each position."""
        length = input_ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=self.positions.dtype)
        x = self.embedding(input_ids) + self.positions[:length]
        return self.block(x, src_mask=mask, is_causal=True) @ self.embedding.weight.T


class Translated(nn.Module):
    """``nn.Transformer``, asked for its target after its source."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(8, 2, 2, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """The first half are the source, the rest the target."""
        return self.body(*x.chunk(2, 1))


class Recurrent(nn.Module):
    """A recurrent network of PyTorch's own, and a head."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.body = kind(4, 4, batch_first=True, **options)
        self.head = nn.Linear(8 if options.get("bidirectional") else 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """The head of each step."""
        return self.head(self.body(x)[0])


def stack(width: int, options: dict[str, Any]) -> nn.Module:
    """Two layers of an encoder."""
    layer = nn.TransformerEncoderLayer(width, 2, 12, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def families() -> Iterator[Family]:
    """All that are listed here."""

    def row(name: str, model: Callable[[], nn.Module], inputs: Callable[[], dict[str, Tensor]]) -> Family:
        return Family("torch", name, model, inputs, first_tensor)

    def sequence(*shape: int, name: str = "input") -> Callable[[], dict[str, Tensor]]:
        return features(*shape, name=name)

    yield row("TransformerEncoder", functools.partial(stack, 8, {}), sequence(5, 8, name="src"))
    before = {"norm_first": True, "activation": "gelu", "bias": False}
    yield row(
        "TransformerEncoder, norms first", functools.partial(stack, 8, before), sequence(5, 8, name="src")
    )
    yield row("Transformer", Translated, sequence(6, 8, name="x"))
    yield row("language model, tied", Tied, tokens())
    for kind in (nn.RNN, nn.GRU, nn.LSTM):
        yield row(kind.__name__, functools.partial(Recurrent, kind), sequence(4, 4, name="x"))
        both = functools.partial(Recurrent, kind, bidirectional=True, num_layers=2)
        yield row(f"{kind.__name__}, two layers, both directions", both, sequence(4, 4, name="x"))
    image = pixels(4, "image", 1)
    yield row("vision transformer, by hand", functools.partial(VisionTransformer, Attention), image)
    yield row(
        "vision transformer, fused attention", functools.partial(VisionTransformer, FlashAttention), image
    )
    yield row("windows, by hand", Windows, lambda: {"image": torch.randn(3, 4, 4, 2)})
    yield row("residual network, by hand", ResNet, lambda: {"x": torch.randn(3, 1, 4, 4)})
    for name, mixture in (
        ("a loop", Mixture),
        ("assignment", Assigned),
        ("sorting", Sorted),
        ("tables", Tables),
    ):
        yield row(
            f"mixture of experts, by {name}",
            functools.partial(lambda made: LastToken(made(), WORDS), mixture),
            lambda: {"ids": tokens(6)()["input_ids"]},
        )
    for adapter in (LowRank, Merged):
        body = functools.partial(
            lambda made: nn.Sequential(made(nn.Linear(4, 6)), nn.Tanh(), made(nn.Linear(6, 3))), adapter
        )
        yield row(f"low-rank adapter, {adapter.__name__.lower()}", body, sequence(4))
