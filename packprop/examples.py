"""Networks on data that need no download; ``packprop profile`` takes ``digits`` by default."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from packprop.errors import PackpropError


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with batch normalisation, around which the input is added back.

    Args:
        inputs: Channels that come in.
        outputs: Channels that go out.
        stride: Of the first convolution; where shapes change, the shortcut is a 1 x 1 convolution.
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
        """``[n, inputs, height, width] -> [n, outputs, height / stride, width / stride]``."""
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class SmallResNet(nn.Module):
    """A residual network for images of one channel: stem, two blocks, head (He et al. 2016).

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
        """``[n, 1, height, width] -> [n, classes]``."""
        x = F.relu(self.norm(self.stem(x)))
        x = self.block2(self.block1(x))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def load_digits() -> tuple[Tensor, Tensor]:
    """The 1797 handwritten digits that ship with scikit-learn, of Alpaydin and Kaynak (UCI, 1998).

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
            "pip install 'packprop[examples]', or profile a model of your own",
        ) from error
    digits: Any = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target)


def digits(seed: int = 0, epochs: int = 5, batch_size: int = 64) -> tuple[nn.Module, nn.Module, TensorDataset]:
    """A small residual network trained for a few seconds, its loss, the digits it was trained on.

    The global random state is left alone.

    Args:
        seed: Of the initial weights and of the order of the training data.
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
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        steps = epochs * -(-len(images) // batch_size)
        # a rate that falls to zero ends where it does not matter which step was the last
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, max(steps, 1))
        for _ in range(epochs):
            for chosen in torch.randperm(len(images)).split(batch_size):
                optimizer.zero_grad()
                loss(model(images[chosen]), classes[chosen]).backward()
                optimizer.step()
                schedule.step()
    model.eval()
    model.zero_grad()
    return model, loss, TensorDataset(images, classes)
