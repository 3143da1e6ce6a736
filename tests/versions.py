"""What older versions of PyTorch cannot do, told by what they do. docs/versions.md is for users."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from packprop.engine.eager import pieces

needs_hooks = pytest.mark.skipif(
    pieces._top is None, reason="PyTorch 2.6 does not tell which hooks on saved tensors are in force"
)
"""For tests of what is not held inside checkpoints and ``save_on_cpu``."""

HAS_EARLY_STOP = "early_stop" in inspect.signature(checkpoint).parameters
"""Whether ``checkpoint`` takes ``early_stop``."""


def _instance_norm_writes() -> bool:
    mean = torch.zeros(2)
    F.instance_norm(torch.ones(1, 2, 3), mean, torch.ones(2), use_input_stats=False)
    return mean._version > 0


INSTANCE_NORM_WRITES = _instance_norm_writes()
"""Whether instance normalisation writes to running statistics that it only reads."""


def _cdist_has_second_derivative() -> bool:
    points = torch.ones(2, 1, requires_grad=True)
    (slope,) = torch.autograd.grad(torch.cdist(points, 2 * points.detach()).sum(), points, create_graph=True)
    try:
        torch.autograd.grad(slope.sum(), points)
    except (RuntimeError, NotImplementedError):
        return False
    return True


CDIST_HAS_SECOND_DERIVATIVE = _cdist_has_second_derivative()
"""Whether ``torch.cdist`` can be differentiated twice, as since PyTorch 2.14."""

AMINMAX_HAS_DERIVATIVE = torch.__version__ >= (2, 13)
"""Whether ``torch.aminmax`` can be differentiated: not in PyTorch 2.10; 2.11 and 2.12 were not tried."""

needs_counting = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="storages of PyTorch 2.13 tell what holds them; others were not tried",
)
"""For tests of results that are written over."""

needs_every_case = pytest.mark.skipif(
    pieces._top is None or INSTANCE_NORM_WRITES, reason="older versions of PyTorch have fewer cases"
)
"""For tests of the list of all cases."""

needs_recent = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="not so in PyTorch 2.6 and 2.10; 2.11 and 2.12 were not tried"
)
"""For what is refused in older versions, for another reason or at all."""
