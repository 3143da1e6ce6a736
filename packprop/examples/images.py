"""Networks on data that need no download; ``packprop profile`` takes ``digits`` by default."""

from __future__ import annotations

import functools
import gzip
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from packprop.engine.tensors import LossFunction
from packprop.errors import BadInput, PackpropError, PackpropWarning, install

MNIST_FOLDER = "PACKPROP_MNIST"
"""Environment variable that names a folder with the IDX files of MNIST."""
MNIST_MEAN, MNIST_DEVIATION = 0.1307, 0.3081
"""Mean and standard deviation of the training images' grey values, from 0 to 1."""


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with batch normalisation, and a shortcut around them.

    Args:
        inputs: Channels of the input.
        outputs: Channels of the output.
        stride: Stride of the first convolution; if shapes change, the shortcut is a 1 x 1 convolution.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, inputs, height, width]`` to ``[n, outputs, height / stride, width / stride]``."""
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class SmallResNet(nn.Module):
    """A residual network for images with one channel: stem, two blocks, head (He et al. 2016).

    Args:
        classes: Number of outputs.
        width: Channels of the stem and the first block; the second block has twice as many.
    """

    def __init__(self, classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.block1 = ResidualBlock(width, width)
        self.block2 = ResidualBlock(width, 2 * width, stride=2)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, 1, height, width]`` to ``[n, classes]``."""
        x = F.relu(self.norm(self.stem(x)))
        x = self.block2(self.block1(x))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def load_digits() -> tuple[Tensor, Tensor]:
    """Load the 1797 handwritten digits that ship with scikit-learn, of Alpaydin and Kaynak (UCI, 1998).

    Returns:
        Grey values from 0 to 1 ``[n, 1, 8, 8]``, classes from 0 to 9 ``[n]``.

    Raises:
        PackpropError: If scikit-learn, which holds the data, is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise PackpropError(
            "The handwritten digits of scikit-learn were asked for.",
            "packprop.examples.load_digits",
            f"scikit-learn cannot be imported ({error})",
            f"{install('examples')}, or profile a model of your own",
        ) from error
    digits: Any = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target)


def read_idx(path: str | Path) -> Tensor:
    """Read a file in the IDX format of MNIST (LeCun, Cortes and Burges, 1998), plain or compressed with gzip.

    Args:
        path: The file.

    Returns:
        Its bytes, in the shape that it states.

    Raises:
        BadInput: If it is not an IDX file of bytes, or its length is not what its header states.
    """
    path = Path(path)
    content = path.read_bytes()
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    axes = content[3] if len(content) > 3 else 0
    head = 4 + 4 * axes
    shape = numpy.frombuffer(content[4:head], ">i4").tolist() if axes and len(content) >= head else []
    if content[:3] != b"\x00\x00\x08" or not shape or len(content) != head + math.prod(shape):
        raise BadInput(
            "A file in the IDX format was to be read.",
            str(path),
            "it has no header of an IDX file of bytes, or its length is not what the header states",
            "fetch the file again; MNIST comes as train-images-idx3-ubyte and train-labels-idx1-ubyte",
        )
    return torch.from_numpy(numpy.frombuffer(content, numpy.uint8, offset=head).reshape(shape).copy())


def load_mnist(root: str | Path | None = None) -> tuple[Tensor, Tensor]:
    """Load the training images of MNIST or, if they are not available, scikit-learn's digits in their format.

    It reads the IDX files in ``root`` or, without ``root``, in the folder that the environment variable
    ``PACKPROP_MNIST`` names. Without both, it looks for IDX files in ``./data/MNIST/raw``, then downloads MNIST
    to ``./data`` with torchvision. If that fails, it enlarges the digits to 20 x 20 pixels inside 28 x 28, and
    warns once.

    Args:
        root: Folder with the IDX files.

    Returns:
        Grey values from 0 to 255 ``[n, 28, 28]`` as bytes, classes from 0 to 9 ``[n]``.

    Raises:
        BadInput: If ``root``, or the folder that the variable names, does not hold the files.
        PackpropError: If there is neither MNIST nor scikit-learn.
    """
    named = root if root is not None else os.environ.get(MNIST_FOLDER)
    folder = Path("data/MNIST/raw" if named is None else named)
    images, labels = (_idx_file(folder, f"train-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
    if images is not None and labels is not None:
        return read_idx(images), read_idx(labels).long()
    if named is not None:
        raise BadInput(
            "MNIST was asked for.",
            f"the folder {str(named)!r}",
            "it does not hold train-images-idx3-ubyte and train-labels-idx1-ubyte, plain or as .gz",
            f"put them there, or leave out root and {MNIST_FOLDER}",
        )
    return _downloaded_mnist()


def _idx_file(folder: Path, name: str) -> Path | None:
    existing = (path for path in (folder / name, folder / f"{name}.gz") if path.is_file())
    return next(existing, None)


@functools.cache
def _downloaded_mnist() -> tuple[Tensor, Tensor]:
    """Load MNIST with torchvision or, with a warning, the digits instead; keep the images for later calls."""
    try:
        from torchvision.datasets import MNIST

        dataset = MNIST("./data", train=True, download=True)
        return dataset.data, dataset.targets
    except (ImportError, OSError, RuntimeError) as error:  # not installed, no network, no mirror that answers
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    images, classes = load_digits()
    large = F.interpolate(images, size=(20, 20), mode="bilinear", align_corners=False)
    warnings.warn(
        f"MNIST was not found ({reason}): packprop uses the digits of scikit-learn, enlarged to 28 x 28. For "
        f"MNIST itself, set the environment variable {MNIST_FOLDER} to a folder with its IDX files.",
        PackpropWarning,
        stacklevel=5,
    )
    return (F.pad(large, (4, 4, 4, 4)).squeeze(1) * 255).round().to(torch.uint8), classes


def load_one_batch_mnist(
    batch_size: int = 64, shuffle: bool = True, flat: bool = False, root: str | Path | None = None
) -> tuple[Tensor, Tensor]:
    """Load one batch of MNIST's training images, shifted and scaled to mean 0 and standard deviation 1.

    A ``DataLoader`` draws the batch from the global random state, so that your seed determines it.
    ``load_mnist`` describes where the images come from.

    Args:
        batch_size: Number of samples.
        shuffle: Draw samples at random; else take the first ones.
        flat: Make each image a vector of its pixels.
        root: Folder with the IDX files of MNIST.

    Returns:
        Images ``[n, 1, 28, 28]``, or ``[n, 784]`` if ``flat``; classes ``[n]``.
    """
    images, classes = next(iter(mnist_loader(batch_size, shuffle, root)))
    return images.flatten(1) if flat else images, classes


def mnist_loader(
    batch_size: int = 64, shuffle: bool = True, root: str | Path | None = None
) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader of MNIST's training images and classes, in the form of ``load_one_batch_mnist``."""
    return DataLoader(TensorDataset(*load_mnist(root)), batch_size, shuffle, collate_fn=_normalised)


def _normalised(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    images = torch.stack([image for image, _ in samples]).unsqueeze(1)
    return (images / 255 - MNIST_MEAN) / MNIST_DEVIATION, torch.stack([label for _, label in samples])


def digits(seed: int = 0, epochs: int = 5, batch_size: int = 64) -> tuple[nn.Module, nn.Module, TensorDataset]:
    """Train a small residual network for a few seconds; return it, its loss, and its training digits.

    This leaves the global random state alone.

    Args:
        seed: Seed of the initial weights and of the order of the training data.
        epochs: Passes over the data set; 0 leaves the network as it was initialised.
        batch_size: Samples in each step of training.

    Returns:
        The network in evaluation mode, the mean cross entropy, the 1797 digits.
    """
    images, classes = load_digits()
    loss = nn.CrossEntropyLoss()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SmallResNet()
        batches = [batch for _ in range(epochs) for batch in torch.randperm(len(images)).split(batch_size)]
    train(model, loss, (images, classes), batches)
    return model, loss, TensorDataset(images, classes)


def train(model: nn.Module, loss: LossFunction, data: tuple[Tensor, Tensor], batches: Sequence[Tensor]) -> None:
    """Train a model, and leave it in evaluation mode without gradients.

    Args:
        model: The model.
        loss: Maps outputs and targets to one number.
        data: Inputs and targets.
        batches: The indices of the samples of each step.
    """
    inputs, targets = data
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    # with a rate that falls to zero, the last steps hardly change the result
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, max(len(batches), 1))
    for chosen in batches:
        optimizer.zero_grad()
        loss(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    model.zero_grad()
