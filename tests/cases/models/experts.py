"""Mixtures of experts, written in several ways: each token is routed to some of the experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Expert(nn.Module):
    """A gated network for single tokens."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, inner), nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Mixture(nn.Module):
    """Loops over the experts, as Mixtral does: each sees its tokens, and adds to their places."""

    def __init__(self, width: int = 3, experts: int = 4, top: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, 2) for _ in range(experts))
        self.top = top

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts of each token ``[t, k]``."""
        weights, chosen = self.gate(tokens).softmax(-1).topk(self.top, -1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(tokens)
        out = torch.zeros_like(tokens)
        mask = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            slot, place = torch.where(mask[number])
            out.index_add_(0, place, expert(tokens[place]) * weights[place, slot, None])
        return out.view_as(x)


class Assigned(Mixture):
    """Results are put into place by assignment; experts without tokens are left out."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(tokens)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            place, slot = (chosen == number).nonzero(as_tuple=True)
            if len(place):
                out[place] += weights[place, slot].unsqueeze(-1) * expert(tokens[place])
        return out.view_as(x)


class Sorted(Mixture):
    """Tokens are sorted by expert, split, and brought back in order."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(tokens)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        parts = tokens[order // self.top].split(counts)
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return (out[back].view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1).view_as(x)


class Tables(Mixture):
    """The weights of all experts in one parameter, of which each expert has a slice."""

    def __init__(self, width: int = 3, experts: int = 3, top: int = 2, inner: int = 2) -> None:
        super().__init__(width, experts, top)
        del self.experts
        self.up = nn.Parameter(torch.randn(experts, 2 * inner, width))
        self.down = nn.Parameter(torch.randn(experts, width, inner))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(tokens)
        out = torch.zeros_like(tokens)
        for number in chosen.unique():  # a tensor, which data decided on
            place, slot = torch.where(chosen == number)
            gate, up = F.linear(tokens[place], self.up[number]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down[number])
            out = out.index_add(0, place, y * weights[place, slot, None])
        return out.view_as(x)


class Grouped(Tables):
    """All experts by one function, which takes tokens that are sorted by expert."""

    product = staticmethod(getattr(F, "grouped_mm", None))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(tokens)
        order = chosen.flatten().argsort(stable=True)
        ends = chosen.flatten().bincount(minlength=len(self.up)).cumsum(0).int()
        gate, up = self.product(tokens[order // self.top], self.up.mT, offs=ends).chunk(2, -1)
        y = self.product(F.silu(gate) * up, self.down.mT, offs=ends)
        back = torch.zeros_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        return (y[back].view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1).view_as(x)


def _grouped_mm(x: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
    """What ``torch._grouped_mm`` computes, in any precision: it has no double precision on a processor."""
    starts = [0, *offs.tolist()]
    groups = zip(starts, starts[1:], weights, strict=False)
    return torch.cat([x[start:stop] @ weight for start, stop, weight in groups])


class GroupedInDouble(Grouped):
    """The same with a stand-in for torch's function."""

    product = staticmethod(_grouped_mm)


class LastToken(nn.Module):
    """A mixture that is used twice, between an embedding and a head that reads the last token alone."""

    def __init__(self, mixture: nn.Module, words: int = 7, width: int = 3) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.mixture, self.head = mixture, nn.Linear(width, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.mixture(self.norm(x))
        return self.head(x + self.mixture(x))[:, -1]
