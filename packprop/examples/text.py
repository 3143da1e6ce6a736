"""A small language model of single characters, on the text of Python's own help pages."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from packprop.errors import PackpropError
from packprop.examples.images import train

OTHER = "·"
"""The character that stands for those without a token of their own."""

CHARACTERS = OTHER + "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1))) + "\u2018\u2019\u201c\u201d\u2026"
"""The character of each token: ``OTHER``, line break, printable ASCII, typographic quotes and ellipsis."""

LENGTH = 64
"""Tokens in a window."""


class TransformerBlock(nn.Module):
    """Causal attention and a network of two layers, each behind a normalisation and beside a shortcut.

    Args:
        width: Entries of a token's vector.
        heads: Heads of the attention.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, tokens, width]`` to ``[n, tokens, width]``."""
        heads = self.attention(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = heads.unbind(2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.contract(F.gelu(self.expand(self.norm2(x))))
        return out


class SmallTransformer(nn.Module):
    """A causal language model: embeddings of tokens and places, two blocks, normalisation, head.

    Args:
        tokens: Number of different tokens.
        width: Entries of a token's vector.
        length: The most tokens of a sample.
        heads: Heads of each block's attention.
    """

    def __init__(
        self, tokens: int = len(CHARACTERS), width: int = 64, length: int = LENGTH, heads: int = 4
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, width)
        self.place = nn.Embedding(length, width)
        self.block1 = TransformerBlock(width, heads)
        self.block2 = TransformerBlock(width, heads)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``[n, length]`` to ``[n, length, tokens]``: logits of the token after each."""
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        out: Tensor = self.head(self.norm(self.block2(self.block1(x))))
        return out


def load_windows(length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Return Python's help pages in windows of characters: the text of ``help("LAMBDAS")`` and other topics.

    The text ships with Python: about half a million characters, which change a little between versions.

    Args:
        length: Characters in a window.

    Returns:
        Tokens ``[n, length]``, and the tokens that follow each of them ``[n, length]``.

    Raises:
        PackpropError: If this Python comes without its help pages.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise PackpropError(
            "The text of Python's help pages was asked for.",
            "packprop.examples.load_windows",
            f"this Python comes without them ({error})",
            "use a Python with its whole standard library, or profile a model of your own",
        ) from error
    known = {character: token for token, character in enumerate(CHARACTERS)}
    text = "\n".join(topics[name] for name in sorted(topics))
    tokens = torch.tensor([known.get(character, 0) for character in text])
    windows = (len(tokens) - 1) // length
    inputs, targets = (tokens[begin:][: windows * length].view(windows, length) for begin in (0, 1))
    return inputs, targets


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean cross entropy over all tokens, of logits ``[n, length, tokens]`` and targets."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def language_model(
    seed: int = 0, steps: int = 300, samples: int = 1024, batch_size: int = 32
) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], TensorDataset]:
    """Train a small causal language model for a few seconds; return it, its loss, and windows of the text.

    ``packprop profile packprop.examples:language_model --decode packprop.examples:decode`` shows the windows
    with the largest gradients as text. This leaves the global random state alone.

    Args:
        seed: Seed of the initial weights and of the order of the training data.
        steps: Steps of training; 0 leaves the network as it was initialised.
        samples: The number of returned windows, evenly spaced over the text; training draws from all.
        batch_size: Windows in each step of training.

    Returns:
        The model in evaluation mode, the mean cross entropy over tokens, the windows with their targets.

    Raises:
        PackpropError: If this Python comes without the text.
    """
    inputs, targets = load_windows()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SmallTransformer()
        batches = [torch.randint(len(inputs), (batch_size,)) for _ in range(steps)]
    train(model, token_cross_entropy, (inputs, targets), batches)
    kept = torch.linspace(0, len(inputs) - 1, min(samples, len(inputs))).long()
    return model, token_cross_entropy, TensorDataset(inputs[kept], targets[kept])


def decode(inputs: Tensor, targets: Tensor) -> list[str]:
    """Return the characters that the model has to predict in a window, for ``packprop profile --decode``.

    Args:
        inputs: The window ``[length]``; not used.
        targets: The tokens that follow each of its tokens ``[length]``.
    """
    return [CHARACTERS[token] for token in targets.tolist()]
