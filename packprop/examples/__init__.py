"""Networks on data that need no download; ``packprop profile`` takes ``digits`` by default."""

from packprop.examples.images import MNIST_DEVIATION as MNIST_DEVIATION
from packprop.examples.images import MNIST_FOLDER as MNIST_FOLDER
from packprop.examples.images import MNIST_MEAN as MNIST_MEAN
from packprop.examples.images import (
    ResidualBlock,
    SmallResNet,
    digits,
    load_digits,
    load_mnist,
    load_one_batch_mnist,
    mnist_loader,
    read_idx,
)
from packprop.examples.text import CHARACTERS as CHARACTERS
from packprop.examples.text import (
    SmallTransformer,
    TransformerBlock,
    decode,
    language_model,
    load_windows,
    token_cross_entropy,
)

__all__ = [
    "ResidualBlock",
    "SmallResNet",
    "SmallTransformer",
    "TransformerBlock",
    "decode",
    "digits",
    "language_model",
    "load_digits",
    "load_mnist",
    "load_one_batch_mnist",
    "load_windows",
    "mnist_loader",
    "read_idx",
    "token_cross_entropy",
]
