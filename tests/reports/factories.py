"""A file of factories, as users write them, and the output of the command."""

from __future__ import annotations

from collections.abc import Callable

FACTORIES = """
import warnings
import torch
from torch import nn

INPUTS, CLASSES = torch.randn(30, 4), torch.randint(2, (30,))
number = 3


def network():
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.BatchNorm1d(3), nn.Linear(3, 2))


def good():
    return network(), nn.CrossEntropyLoss(), (INPUTS, CLASSES)


def batches():
    return [network(), nn.CrossEntropyLoss(), [(INPUTS[:20], CLASSES[:20]), (INPUTS[20:], CLASSES[20:])]]


class Project:
    def factory():
        return good()


def drawn():
    return network(), nn.CrossEntropyLoss(), (torch.randn(9, 4), torch.randint(2, (9,)))


def marks():
    open("ran", "w").close()
    return good()


def raises():
    return 1 / 0


def leaves():
    raise SystemExit(3)


def pair():
    return network(), nn.CrossEntropyLoss()


def nothing():
    pass


def takes(path):
    return good()


def a_class():
    return nn.Linear, nn.MSELoss(), (INPUTS, INPUTS)


def loss_class():
    return network(), nn.CrossEntropyLoss, (INPUTS, CLASSES)


def no_data():
    return network(), nn.CrossEntropyLoss(), 5


def empty():
    return network(), nn.CrossEntropyLoss(), []


def wide():
    return network(), nn.CrossEntropyLoss(), (torch.randn(30, 5), CLASSES)


def late():
    return network(), nn.CrossEntropyLoss(), [(INPUTS, CLASSES), (INPUTS, CLASSES + 5)]


def dictionary():
    return network(), nn.CrossEntropyLoss(), [{"inputs": INPUTS}]


def linear_loss():
    return network(), nn.NLLLoss(), (INPUTS, CLASSES)


def infinite():
    return network(), nn.MSELoss(), (INPUTS / 0, torch.zeros(30, 2))


def warns():
    warnings.warn("look out")
    warnings.warn("look out")
    return good()


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x):
        if len(x) < 20:
            raise ValueError("too few")
        return self.inner(x)


def own():
    return Own(), nn.CrossEntropyLoss(), [(INPUTS[:20], CLASSES[:20]), (INPUTS[20:], CLASSES[20:])]
"""

Run = Callable[..., tuple[int, str, str]]
