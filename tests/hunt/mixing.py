"""Lines after which no sample stands for itself: what they lead to must be refused."""

from __future__ import annotations

from tests.hunt.writing import Form, Writer

ANY = (
    "h - h.mean(0)",
    "h - 0.1 * h.mean()",
    "h + {zero} * h.mean(0)",
    "h + {gate} * h.mean(0)",
    "h.softmax(0)",
    "h / h.norm()",
    "h.cumsum(0)",
    "h + h.flip(0)",
    "h.roll(1, 0) + h",
    "h - h.amax(0)",
    "h[torch.arange(n).roll(1)] * h",
    "h.sort(0).values",
    "(h.flatten(1) @ h.flatten(1).T / 4 @ h.flatten(1)).view_as(h)",
    "torch.cat([h[:1] + h[1:2], h[1:]])",
    "torch.where(h > h.mean(0), h, 0.5 * h.sum(0))",
    "(h.flatten(1).T.reshape(n, -1) + h.flatten(1)).view_as(h)",
    "h + torch.cdist(h.flatten(1), h.flatten(1)).pow(2).mean() / 9",
    "h + {zero} * h.flip(0)",
    "F.batch_norm(h.flatten(1), None, None, training=True).view_as(h)",
    "h * h.std(0)",
)
VECTORS = (
    "{norm}(h)",
    "torch.cat([h, h.mean(0, keepdim=True).expand_as(h)], -1)[:, 1:{d} + 1]",
    "F.scaled_dot_product_attention(h[None], h[None], h[None])[0]",
)
SEQUENCES = (
    "{attention}(h, h, h)[0]",
    "F.scaled_dot_product_attention(h.transpose(0, 1), h.transpose(0, 1), h.transpose(0, 1)).transpose(0, 1)",
    "torch.einsum('nti,mti->nm', h, h).softmax(-1)[:, :1, None] * h",
)


def mix(w: Writer, form: Form) -> str:
    """Write a linear layer, so that something is mixed that parameters made, and a line that mixes."""
    d = form.last
    w.set(f"{w.module(f'nn.Linear({d}, {d})')}(h)")
    choices = [
        *ANY,
        *(VECTORS * 4 if form.kind == "vec" else ()),
        *(SEQUENCES * 4 if form.kind == "seq" else ()),
    ]
    text = w.rng.choice(choices)
    made = {"d": str(d)}
    for gate, start in (("zero", "zeros"), ("gate", "ones")):
        if f"{{{gate}}}" in text:
            made[gate] = w.name(f"self.gate_{start}")
            w.init.append(f"{made[gate]} = nn.Parameter(torch.{start}(1))")
    if "{norm}" in text:
        made["norm"] = w.module(f"nn.BatchNorm1d({d}, track_running_stats=False)")
    if "{attention}" in text:
        made["attention"] = w.module(f"nn.MultiheadAttention({d}, 1)")
    w.set(text.format(**made))
    return text
