"""The preconditioner of an optimizer, as the curvature that it stands for."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from packprop.engine.tensors import accumulation_dtype, named_parameters
from packprop.errors import BadInput

ASKED = "optimizer_curvature(...) was called."

ADAPTIVE = {
    torch.optim.Adam: "exp_avg_sq",
    torch.optim.AdamW: "exp_avg_sq",
    torch.optim.RMSprop: "square_avg",
    torch.optim.Adagrad: "sum",
}
"""Optimizers that divide by the root of accumulated squares, and the key of the squares in their state."""


def optimizer_curvature(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the diagonals D ``[*p]``, by parameter, for which the optimizer's current step is ``D^-1 g``.

    For Adam and AdamW that is ``(sqrt(v / (1 - beta2^t)) + eps) / lr``, with the second moments v (Kingma and
    Ba 2015; Loshchilov and Hutter 2019), for RMSprop and Adagrad their own, for SGD ``1 / lr``. D leaves out
    momentum, which spreads a step over later ones, and weight decay, which depends on no sample.

    Pass it as ``curvature`` to ``influence`` with ``damping=0``: a product ``<g_z, D^-1 g_q>`` is to first
    order the fall of the loss of q by a step on the sample z alone, with the moments as they are (Pruthi et al.
    2020; Xia et al. 2024). ``tracin`` adds them up over checkpoints.

    Args:
        model: The model.
        optimizer: One of Adam, AdamW, RMSprop, Adagrad, SGD; all but SGD after a step.

    Raises:
        BadInput: For another optimizer, a subclass with a step of its own, ``maximize=True``, a parameter
            without a step, or a rate of 0.
    """
    known = [*ADAPTIVE, torch.optim.SGD]
    kind = next((each for each in known if isinstance(optimizer, each) and _steps_as(optimizer, each)), None)
    if kind is None:
        names = ", ".join(each.__name__ for each in known)
        why = "packprop does not know what it divides gradients by"
        raise BadInput(ASKED, type(optimizer).__name__, why, f"give one of {names}, or a diagonal of your own")
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    found = {}
    for name, parameter in named_parameters(model):
        if not parameter.requires_grad:
            continue
        group, state = groups.get(id(parameter), {"lr": 0}), optimizer.state.get(parameter, {})
        if not float(group["lr"]) or (kind in ADAPTIVE and not float(state.get("step", 0))):
            why = "the optimizer does not hold it, has made no step with it, or has a learning rate of 0 for it"
            instead = "give the optimizer as it was in training, or set requires_grad=False on the parameter"
            raise BadInput(ASKED, f"parameter {name!r}", why, instead)
        if group.get("maximize"):
            why = "the optimizer has maximize=True: its step raises the loss, which no positive D describes"
            raise BadInput(ASKED, f"parameter {name!r}", why, "minimise the negative of the loss")
        found[name] = _divisor(kind, group, state, parameter) / float(group["lr"])
    return found


def _steps_as(optimizer: torch.optim.Optimizer, known: Any) -> bool:
    """Tell whether an optimizer has the step of a known class; PyTorch wraps steps for its profiler."""
    return inspect.unwrap(type(optimizer).step) is inspect.unwrap(known.step)


@torch.no_grad()
def _divisor(kind: Any, group: dict[str, Any], state: dict[str, Any], parameter: Tensor) -> Tensor:
    """Return the divisor of a gradient ``[*p]``, without the learning rate."""
    if kind is torch.optim.SGD:
        return torch.ones_like(parameter, dtype=accumulation_dtype(parameter.dtype))
    squares = state["max_exp_avg_sq"] if group.get("amsgrad") else state[ADAPTIVE[kind]]
    squares = squares.to(accumulation_dtype(squares.dtype))
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        squares = squares / (1 - float(group["betas"][1]) ** float(state["step"]))
    if group.get("centered"):
        squares = squares - state["grad_avg"].to(squares).square()
    divisor: Tensor = squares.clamp(min=0).sqrt() + float(group["eps"])
    if kind is torch.optim.Adagrad:  # whose rate falls
        divisor = divisor * (1 + (float(state["step"]) - 1) * float(group["lr_decay"]))
    return divisor
