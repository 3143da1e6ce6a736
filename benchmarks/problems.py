"""The models, losses and data on which contestants are compared.

A problem is a row of ``PROBLEMS``; a suite names the problems that share one results file. Every
problem is seeded, so that a fresh process builds the very same weights and data from its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.vision import vision_model

ALL_EIGHT = (
    "BatchGrad",
    "BatchL2Grad",
    "SumGradSquared",
    "Variance",
    "DiagGGNExact",
    "DiagGGNMC",
    "KFAC",
    "KFLR",
)
PRODUCT = "Hessian-vector product"
TOGETHER = ("gradient seed", "exact seed", "Monte Carlo seed", "all but KFLR", "all eight")


@dataclass(frozen=True)
class Task:
    """A problem that has been built.

    ``inputs`` is ``[n, ...]``, ``targets`` is ``[n]`` (classes) or ``[n, c]`` (regression).
    """

    model: nn.Module
    loss: nn.Module
    inputs: Tensor
    targets: Tensor

    def head(self, count: int) -> Task:
        """Return the same task on the first ``count`` samples."""
        return replace(self, inputs=self.inputs[:count], targets=self.targets[:count])


@dataclass(frozen=True)
class Problem:
    """One row: what to build, and which quantities are asked of it.

    ``data`` maps a batch size to ``(inputs, targets)``. ``chunks`` are the numbers of backward
    passes in which BackPACK is also given its outputs, where its documentation advises that.
    ``point`` is the position on a growth curve. ``note`` is for readers of the page.
    """

    title: str
    model: Callable[[], nn.Module]
    loss: Callable[[], nn.Module]
    data: Callable[[int], tuple[Tensor, Tensor]]
    batch: int
    quantities: tuple[str, ...]
    chunks: tuple[int, ...] = ()
    point: int | None = None
    note: str = ""

    def build(self, seed: int = 0) -> Task:
        """Build model, loss and data from a seed, in training mode, in float32."""
        torch.manual_seed(seed)
        inputs, targets = self.data(self.batch)
        return Task(self.model(), self.loss(), inputs, targets)


# --------------------------------------------------------------------------------------- data


def digits(batch: int, size: int) -> tuple[Tensor, Tensor]:
    """Return handwritten digits of scikit-learn, resized: ``[n, 1, size, size]`` and ``[n]``."""
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    chosen = torch.randperm(len(classes))[:batch]
    images = torch.from_numpy(pixels).float()[chosen].reshape(batch, 1, 8, 8) / 16
    resized = nn.functional.interpolate(images, size=(size, size), mode="bilinear")
    return resized, torch.from_numpy(classes).long()[chosen]


def random_images(batch: int, channels: int = 3, size: int = 32, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Return normal noise and random classes, for shapes that scikit-learn has no images of."""
    return torch.randn(batch, channels, size, size), torch.randint(classes, (batch,))


def reconstruction(batch: int) -> tuple[Tensor, Tensor]:
    """Return uniform noise ``[n, 3, 32, 32]`` and itself, flattened, as the target."""
    images = torch.rand(batch, 3, 32, 32)
    return images, images.flatten(start_dim=1)


# ------------------------------------------------------------------------------------- models


def convolution_tutorial() -> nn.Sequential:
    """The CNN of BackPACK's tutorial on saving memory in convolutions."""
    return nn.Sequential(
        nn.Conv2d(1, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(128, 256, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, padding=1, stride=2),
        nn.Conv2d(256, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(64, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def auto_encoder_tutorial() -> nn.Sequential:
    """The auto-encoder of BackPACK's tutorial on ``retain_graph``."""
    encoder = nn.Sequential(nn.Conv2d(3, 10, 3), nn.Sigmoid())
    decoder = nn.Sequential(nn.ConvTranspose2d(10, 3, 3), nn.Flatten())
    return nn.Sequential(encoder, decoder)


def extension_hook_tutorial() -> nn.Sequential:
    """The linear layer of BackPACK's tutorial on the extension hook."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def three_c_three_d(activation: type[nn.Module] = nn.ReLU, flat: int = 1152) -> nn.Sequential:
    """3C3D as in DeepOBS: three convolutions, three dense layers, 895 210 parameters.

    ``ceil_mode`` stands for the one-sided padding that DeepOBS takes over from TensorFlow. ``flat`` is what is
    left of an image for the dense layers, 1152 of 32 x 32 pixels.
    """

    def block(before: int, after: int, kernel: int, padding: int) -> list[nn.Module]:
        convolution = nn.Conv2d(before, after, kernel, padding=padding)
        return [convolution, activation(), nn.MaxPool2d(3, stride=2, ceil_mode=True)]

    return nn.Sequential(
        *block(3, 64, 5, 0),
        *block(64, 96, 3, 0),
        *block(96, 128, 3, 1),
        nn.Flatten(),
        nn.Linear(flat, 512),
        activation(),
        nn.Linear(512, 256),
        activation(),
        nn.Linear(256, 10),
    )


def sigmoid_mlp() -> nn.Sequential:
    """784-100-100-10 with sigmoids."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 100),
        nn.Sigmoid(),
        nn.Linear(100, 100),
        nn.Sigmoid(),
        nn.Linear(100, 10),
    )


def all_cnn_c(classes: int = 100) -> nn.Sequential:
    """All-CNN-C (Springenberg et al., 2015) without dropout, whose draws would differ."""

    def layer(before: int, after: int, kernel: int, stride: int, padding: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, kernel, stride=stride, padding=padding), nn.ReLU()]

    return nn.Sequential(
        *layer(3, 96, 3, 1, 1),
        *layer(96, 96, 3, 1, 1),
        *layer(96, 96, 3, 2, 1),
        *layer(96, 192, 3, 1, 1),
        *layer(192, 192, 3, 1, 1),
        *layer(192, 192, 3, 2, 1),
        *layer(192, 192, 3, 1, 0),
        *layer(192, 192, 1, 1, 0),
        *layer(192, classes, 1, 1, 0),
        nn.AvgPool2d(6),
        nn.Flatten(),
    )


def plain_convolutions(classes: int, width: int, depth: int) -> nn.Sequential:
    """A stem, then ``depth`` equal convolutions on 16 x 16 pixels: the model that grows."""
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(16), nn.Flatten(), nn.Linear(width, classes))


class CausalBlock(nn.Module):
    """Causal attention by one packed projection, and two dense layers, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_dense = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.projections(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        hidden: Tensor = nn.functional.gelu(self.up(self.before_dense(x)))
        return x + self.down(hidden)


class CausalModel(nn.Module):
    """Next-token logits ``[n, words, t]`` as GPT-2 computes them, with a head of its own."""

    def __init__(self, words: int, width: int, heads: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(CausalBlock(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.ones_like(tokens).cumsum(1) - 1
        logits: Tensor = self.head(self.norm(self.blocks(self.words(tokens) + self.places(places))))
        return logits.mT


class LowRank(nn.Module):
    """A frozen linear layer and a trained product of two thin matrices beside it (Hu et al. 2022)."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.layer(x) + self.up(self.down(x))
        return changed


class First(nn.Module):
    """The first of several outputs: those of all steps of a recurrent layer."""

    def forward(self, outputs: tuple[Tensor, ...]) -> Tensor:
        return outputs[0]


class ClassesSecond(nn.Module):
    """From ``[n, t, c]`` to ``[n, c, t]``."""

    def forward(self, logits: Tensor) -> Tensor:
        return logits.mT


def recurrent_language_model(words: int = 1024, width: int = 256) -> nn.Sequential:
    """An LSTM between an embedding and a head, in the form that every library can take."""
    return nn.Sequential(
        nn.Embedding(words, width // 2),
        nn.LSTM(width // 2, width, batch_first=True),
        First(),
        nn.Linear(width, words),
        ClassesSecond(),
    )


def language_model() -> CausalModel:
    """Four blocks of width 256, 256 tokens, 8192 words: 7.4 million parameters."""
    return CausalModel(words=8192, width=256, heads=4, layers=4, tokens=256)


def small_perceptron() -> nn.Sequential:
    """Layers 10-16-16-3: the work is that of Python."""
    return nn.Sequential(
        *(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)),
    )


def random_vectors(batch: int, size: int = 10, classes: int = 3) -> tuple[Tensor, Tensor]:
    """Return normal vectors ``[n, size]`` and random classes ``[n]``."""
    return torch.randn(batch, size), torch.randint(classes, (batch,))


def small_language_model() -> CausalModel:
    """Four blocks of width 64, 32 tokens, 128 words: 0.22 million parameters."""
    return CausalModel(words=128, width=64, heads=4, layers=4, tokens=32)


def adapted_language_model() -> nn.Module:
    """The same, frozen, with adapters of rank 8."""
    return adapted(language_model(), rank=8)


def adapted(model: nn.Module, rank: int) -> nn.Module:
    """Freeze a model, and put adapters at every linear layer of its blocks."""
    model.requires_grad_(False)
    for block in model.get_submodule("blocks").children():
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, LowRank(layer, rank))
    return model


def tokens(batch: int, words: int = 8192, length: int = 256) -> tuple[Tensor, Tensor]:
    """Return random tokens and the next ones, ``[n, t]`` each."""
    drawn = torch.randint(words, (batch, length + 1))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


# --------------------------------------------------------------------------------------- rows

PROBLEMS: dict[str, Problem] = {
    "convolution": Problem(
        "Convolution tutorial: CNN with 1-128-256-64-32 channels, digits 28 x 28, N = 64, C = 10",
        convolution_tutorial,
        nn.CrossEntropyLoss,
        partial(digits, size=28),
        batch=64,
        quantities=ALL_EIGHT + TOGETHER,
    ),
    "auto-encoder": Problem(
        "Auto-encoder tutorial: 3072 outputs, 3 x 32 x 32, N = 5",
        auto_encoder_tutorial,
        nn.MSELoss,
        reconstruction,
        batch=5,
        quantities=("BatchGrad", "Variance", "DiagGGNExact", "DiagGGNMC"),
        chunks=(4, 16, 64),
    ),
    "extension-hook": Problem(
        "Extension-hook tutorial: linear layer 784 to 10, digits 28 x 28, N = 128",
        extension_hook_tutorial,
        nn.CrossEntropyLoss,
        partial(digits, size=28),
        batch=128,
        quantities=(*ALL_EIGHT, "trace of DiagGGNExact by hook", "trace of DiagHessian by hook"),
    ),
    "3c3d": Problem(
        "3C3D: random images 3 x 32 x 32, N = 64, C = 10",
        three_c_three_d,
        nn.CrossEntropyLoss,
        random_images,
        batch=64,
        quantities=ALL_EIGHT,
    ),
    "all-cnn-c": Problem(
        "All-CNN-C: random images 3 x 32 x 32, N = 8, C = 100",
        all_cnn_c,
        nn.CrossEntropyLoss,
        partial(random_images, classes=100),
        batch=8,
        quantities=ALL_EIGHT,
    ),
    "sigmoid-mlp": Problem(
        "MLP 784-100-100-10 with sigmoids: digits 28 x 28, N = 64, C = 10",
        sigmoid_mlp,
        nn.CrossEntropyLoss,
        partial(digits, size=28),
        batch=64,
        quantities=("DiagHessian", "KFLR", "KFRA", PRODUCT),
        note="BackPACK's KFRA is an option of its HBP. Like packprop's, it needs a chain of layers. It takes "
        "only sequences of modules that it knows: linear and convolutional layers, pooling, and elementwise "
        "activations.",
    ),
    "sigmoid-3c3d": Problem(
        "3C3D with sigmoids: random images 3 x 16 x 16, N = 2, C = 10",
        partial(three_c_three_d, nn.Sigmoid, flat=128),
        nn.CrossEntropyLoss,
        partial(random_images, size=16),
        batch=2,
        quantities=("DiagHessian",),
        note="Small images and two of them, so that everybody comes to an end: for each activation BackPACK "
        "keeps two dense matrices, of positive and of negative curvature, with N x units x units entries. Of "
        "the first one, for 64 images of 32 x 32 pixels, these would take 1.2 TiB.",
    ),
    "sigmoid-3c3d-product": Problem(
        "3C3D with sigmoids: random images 3 x 32 x 32, N = 64, C = 10",
        partial(three_c_three_d, nn.Sigmoid),
        nn.CrossEntropyLoss,
        random_images,
        batch=64,
        quantities=(PRODUCT,),
    ),
    "language-model": Problem(
        "Language model: 4 blocks of width 256, 256 tokens, vocabulary 8192, N = 8",
        language_model,
        nn.CrossEntropyLoss,
        tokens,
        batch=8,
        quantities=("BatchL2Grad", "SumGradSquared", "Variance", "DiagGGNMC", "KFAC", "gradient seed"),
        note="A token is not a sample: there would be 256 x 8191 exact columns. So we do not compare Monte "
        "Carlo quantities with exact ones here; the tests do that on small models.",
    ),
    "small-perceptron": Problem(
        "Small perceptron: 10-16-16-3, N = 32",
        small_perceptron,
        nn.CrossEntropyLoss,
        random_vectors,
        batch=32,
        quantities=("BatchL2Grad", "Variance", "KFAC"),
    ),
    "small-language-model": Problem(
        "Small language model: 4 blocks of width 64, 32 tokens, vocabulary 128, N = 8",
        small_language_model,
        nn.CrossEntropyLoss,
        partial(tokens, words=128, length=32),
        batch=8,
        quantities=("BatchL2Grad", "Variance", "KFAC"),
    ),
    "low-rank-adapters": Problem(
        "The language model, frozen, with adapters of rank 8 at 16 linear layers, N = 8",
        adapted_language_model,
        nn.CrossEntropyLoss,
        tokens,
        batch=8,
        quantities=(
            "BatchGrad",
            "BatchL2Grad",
            "SumGradSquared",
            "Variance",
            "gradient seed",
            "DiagGGNMC",
            "KFAC",
        ),
    ),
    "recurrent-language-model": Problem(
        "Recurrent language model: LSTM of width 256, 48 tokens, vocabulary 1024, N = 32",
        recurrent_language_model,
        nn.CrossEntropyLoss,
        partial(tokens, words=1024, length=48),
        batch=32,
        quantities=("BatchGrad", "BatchL2Grad", "Variance"),
    ),
    "vision-transformer": Problem(
        "Vision transformer of timm: vit_tiny_patch16_224, images 3 x 224 x 224, N = 8, C = 10",
        partial(vision_model, "vit_tiny_patch16_224"),
        nn.CrossEntropyLoss,
        partial(random_images, size=224),
        batch=8,
        quantities=("BatchL2Grad", "DiagGGNMC"),
    ),
    "convnext": Problem(
        "ConvNeXt of timm: convnext_tiny, images 3 x 224 x 224, N = 4, C = 10",
        partial(vision_model, "convnext_tiny"),
        nn.CrossEntropyLoss,
        partial(random_images, size=224),
        batch=4,
        quantities=("BatchL2Grad", "DiagGGNMC"),
    ),
}

GROWTH: dict[str, tuple[int, ...]] = {
    "N": (8, 16, 32, 64, 128),
    "C": (2, 5, 10, 20, 50, 100),
    "width": (8, 16, 32, 64, 128),
    "depth": (1, 2, 4, 8, 16),
}


def grown(axis: str, size: int) -> Problem:
    """Return the growing problem with one of ``N``, ``C``, ``width``, ``depth`` set to ``size``."""
    sizes = {"N": 32, "C": 10, "width": 32, "depth": 4} | {axis: size}
    return Problem(
        "Growth: 3 x 3 convolutions on 16 x 16 pixels; "
        + ", ".join(f"{name} = {value}" for name, value in sizes.items()),
        partial(plain_convolutions, sizes["C"], sizes["width"], sizes["depth"]),
        nn.CrossEntropyLoss,
        partial(random_images, channels=1, size=16, classes=sizes["C"]),
        batch=sizes["N"],
        quantities=("BatchGrad", "BatchL2Grad", "DiagGGNExact", "DiagGGNMC", "KFAC"),
        point=size,
    )


SUITES: dict[str, tuple[str, ...]] = {name: (name,) for name in PROBLEMS} | {
    f"growth-{axis}": tuple(f"growth-{axis}-{size}" for size in sizes) for axis, sizes in GROWTH.items()
}
PROBLEMS |= {f"growth-{axis}-{size}": grown(axis, size) for axis, sizes in GROWTH.items() for size in sizes}
