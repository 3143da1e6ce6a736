"""Blocks that work on the last axis, whatever stands before it: layers, raw parameters, functions, wrappers."""

from __future__ import annotations

from collections.abc import Callable

from tests.hunt.writing import LAST, Form, Writer, block, same_form

SMOOTH = (
    "torch.tanh(h)",
    "F.gelu(h)",
    "F.gelu(h, approximate='tanh')",
    "torch.sigmoid(h)",
    "F.softplus(h)",
    "F.silu(h)",
    "torch.sin(h)",
    "F.mish(h)",
    "F.logsigmoid(h)",
    "h * h",
    "h ** 3 / 4",
    "h * torch.sigmoid(h)",
    "torch.exp(-h ** 2)",
    "torch.sqrt(1 + h ** 2)",
    "torch.log1p(h ** 2)",
    "torch.atan(h)",
    "torch.erf(h)",
)
PIECEWISE = (
    "F.relu(h)",
    "F.leaky_relu(h, 0.1)",
    "F.elu(h)",
    "F.selu(h)",
    "F.hardtanh(h)",
    "F.hardswish(h)",
    "F.softshrink(h, 0.1)",
    "h.abs()",
    "h.clamp(-0.8, 0.9)",
    "torch.where(h > 0, h, 0.3 * h)",
    "torch.maximum(h, 0.2 * h)",
    "F.relu(h.clone(), inplace=True)",
)
OVER_FEATURES = (
    "h.softmax(-1)",
    "h.log_softmax(-1)",
    "F.normalize(h + 0.1, dim=-1)",
    "h - h.mean(-1, keepdim=True)",
    "h - h.logsumexp(-1, keepdim=True)",
    "h.cumsum(-1)",
    "h / (1 + h.norm(dim=-1, keepdim=True))",
    "h.sort(-1).values",
    "torch.cat([h[..., 1:], h[..., :1]], -1)",
    "h.flip(-1)",
    "h.roll(1, -1)",
    "torch.stack(list(h.unbind(-1))[::-1], -1)",
    "torch.cat(h.split(1, -1)[::-1], -1)",
    "h.unfold(-1, 1, 1).squeeze(-1)",
    "h.contiguous().view(h.shape)",
    "h.unsqueeze(-1).expand(*h.shape, 2).mean(-1)",
    "torch.zeros_like(h).scatter(-1, torch.arange({d}).flip(0).expand_as(h), h)",
    "h.gather(-1, torch.arange({d}).roll(1).expand_as(h))",
    "h.index_select(-1, torch.tensor({index}))",
    "h[..., {index}]",
    "h.masked_fill(torch.arange({d}) == 0, 0.5)",
    "h * (torch.arange({d}) > 0)",
    "F.dropout(h, 0.5, self.training)",
    "F.pad(h, (1, 0))[..., :-1]",
)
SCALES = (
    "{w} * h",
    "h * {w}",
    "h + {w}",
    "h - {w}.expand_as(h)",
    "h * {w}.expand_as(h)",
    "h * {w}.type_as(h)",
    "h + {w}.type_as(h)",
    "h * {w}.to(h)",
    "h + {w}.to(h)",
    "torch.mul(*torch.broadcast_tensors(h, {w}))",
    "torch.add(*torch.broadcast_tensors({w}, h))",
    "h / (1 + {w} ** 2)",
    "torch.addcmul(h, h, {w})",
    "torch.where(h > 0, h, {w} * h)",
    "torch.where(h > {w}, h, {w})",
    "h * {w}.exp()",
    "h + {w}.roll(1)",
    "h * {w}.clamp(-1, 1)",
    "h * {w}.sum()",
    "torch.lerp(h, {w}.expand_as(h), 0.3)",
    "torch.lerp(h, h.tanh(), {w})",
    "torch.stack([h, {w}.expand_as(h)]).sum(0)",
    "torch.stack(torch.broadcast_tensors(h, {w}), -1).prod(-1)",
    "F.layer_norm(h, ({d},), {w}, {v})",
    "F.rms_norm(h, ({d},), {w})",
    "torch.add(h, {w}, alpha=0.5)",
    "h.clone().mul_({w})",
    "h.clone().add_({w})",
    "torch.hypot(h, {w})",
    "torch.maximum(h, {w})",
    "torch.pow(h.abs() + 0.5, {w})",
    "h * torch.cat([{w}, {v}])[{index}]",
    "h * {w}[{index}]",
    "h + {w}[torch.tensor({index})]",
    "h + {w}[..., {index}].sin()",
    "h * torch.stack([{w}, {v}]).mean(0)",
    "h * {w} + {v} * h.tanh()",
    "h + {w} * {v}",
    "h * {w} * {w}",
    "h.mul({w}.view(1, -1))",
    "torch.einsum('...i,i->...i', h, {w})",
    "F.conv1d(h.reshape(-1, 1, {d}), {w}.mean().expand(1, 1, 1)).reshape(h.shape)",
    "F.conv1d(h.reshape(-1, 1, {d}), {w}[:1].expand(2).view(1, 1, 2), padding=1)[..., 1:].reshape(h.shape)",
    "F.prelu(h.reshape(-1, {d}), {w}).view_as(h)",
    "torch.cdist(h.reshape(-1, {d}), {w}[None]).view(*h.shape[:-1], 1) * h",
    "h + F.embedding(torch.arange({d}), {w}[:, None]).squeeze(-1)",
)
MAPS = (
    "h @ {w}",
    "torch.matmul(h, {w})",
    "h.matmul({w}.softmax(0))",
    "F.linear(h, {w}.t())",
    "F.linear(h, {w}.mT / {w}.norm())",
    "torch.einsum('...i,io->...o', h, {w})",
    "torch.einsum('...i,io->...o', h, {w}.tril())",
    "torch.tensordot(h, {w}, dims=1)",
    "({w}.t() @ h.unsqueeze(-1)).squeeze(-1)",
    "(h.unsqueeze(-1) * {w}).sum(-2)",
    "h @ {w}.type_as(h)",
    "F.linear(h, {w}.to(h).t().contiguous())",
    "F.linear(h, {w}.t(), {w}[0])",
    "torch.addmm({w}[0], h.reshape(-1, {d}), {w}).view(*h.shape[:-1], {e})",
    "F.bilinear(h, h.tanh(), torch.stack([{w}] * {d}).permute(2, 0, 1))",
)
COMPLEX = (
    "torch.fft.irfft(torch.fft.rfft(h) * torch.view_as_complex({pairs}), n={d})",
    "torch.fft.irfft(torch.fft.rfft(h) * torch.polar({half}.abs() + 0.1, {half2}), n={d})",
    "torch.fft.irfft(torch.fft.rfft(h) * {half}, n={d})",
    "torch.fft.irfft(torch.fft.rfft(h) * torch.fft.rfft({w}), n={d})",
    "(torch.complex(h, 0.5 * h.tanh()) * torch.complex({w}, {v})).real",
    "(torch.complex(h, 0.5 * h.tanh()) * torch.complex({w}, {v})).imag",
    "torch.complex(h, h * {w} + 1).abs()",
    "torch.view_as_real(torch.complex(h, h) * torch.polar({w}, {v})).sum(-1)",
    "torch.fft.ifft(torch.fft.fft(h) * torch.exp(1j * {w})).real",
)


def _filled(w: Writer, form: Form, text: str) -> str:
    """A template with its parameters made; the same name is the same parameter."""
    d, half = form.last, form.last // 2 + 1
    shapes = {"w": (d,), "v": (d,), "pairs": (half, 2), "half": (half,), "half2": (half,)}
    found = {key: w.weight(*shape) for key, shape in shapes.items() if f"{{{key}}}" in text}
    index = [w.rng.randrange(d) for _ in range(d)]
    return text.format(**found, d=d, index=index)


@block(*LAST, "image", "map", weight=2.0, same=True)
def smooth(w: Writer, form: Form) -> Form:
    w.set(w.choose(*SMOOTH))
    return form


@block(*LAST, "image", "map", weight=1.0, same=True)
def piecewise(w: Writer, form: Form) -> Form:
    w.set(w.choose(*PIECEWISE))
    return form


@block(*LAST, "image", "map", weight=1.2, same=True)
def over_features(w: Writer, form: Form) -> Form:
    w.set(_filled(w, form, w.choose(*OVER_FEATURES)))
    return form


@block(*LAST, "image", "map", weight=2.5, same=True)
def raw_scale(w: Writer, form: Form) -> Form:
    w.set(_filled(w, form, w.choose(*SCALES)))
    return form


@block(*LAST, weight=1.0, same=True)
def complex_branch(w: Writer, form: Form) -> Form:
    w.set(_filled(w, form, w.choose(*COMPLEX)))
    return form


@block(*LAST, weight=1.5)
def raw_map(w: Writer, form: Form) -> Form:
    d, e = form.last, w.size()
    w.set(w.choose(*MAPS).format(w=w.weight(d, e), d=d, e=e))
    return form.with_last(e)


@block(*LAST, weight=2.0)
def linear(w: Writer, form: Form) -> Form:
    e = w.size()
    w.set(f"{w.module(f'nn.Linear({form.last}, {e}, bias={w.chance(0.7)})')}(h)")
    return form.with_last(e)


@block(*LAST, weight=1.0)
def parametrised(w: Writer, form: Form) -> Form:
    d, e = form.last, w.size()
    inner = f"nn.Linear({d}, {e})"
    text = w.choose(
        f"parametrizations.weight_norm({inner})",
        f"parametrizations.spectral_norm({inner})",
        f"parametrized({inner}, 'weight', Squash())",
        f"parametrized({inner}, 'bias', Squash())",
        f"parametrizations.orthogonal({inner})",
    )
    w.set(f"{w.module(text)}(h)")
    return form.with_last(e)


@block(*LAST, weight=1.0)
def low_rank(w: Writer, form: Form) -> Form:
    d, e = form.last, w.size()
    w.set(f"F.linear(h, {w.weight(e, 2)} @ {w.weight(2, d)})")
    return form.with_last(e)


@block(*LAST, weight=1.2, same=True)
def tied(w: Writer, form: Form) -> Form:
    d, e = form.last, w.size()
    layer = w.module(f"nn.Linear({d}, {e})")
    way = w.choose("transpose", "twice", "two modules", "functional", "slices")
    if way == "transpose":
        w.set(f"F.linear(torch.tanh({layer}(h)), {layer}.weight.t())")
        return form
    square = w.module(f"nn.Linear({d}, {d})")
    if way == "twice":
        w.set(f"{square}(torch.tanh({square}(h)))")
    elif way == "two modules":
        other = w.module(f"nn.Linear({d}, {d})")
        w.init.append(f"{other}.weight = {square}.weight")
        w.set(f"{other}(torch.tanh({square}(h)))")
    elif way == "functional":
        w.set(f"F.linear(torch.sin({square}(h)), {square}.weight) + h @ {square}.weight")
    else:
        w.set(f"{square}(h) * {square}.weight[0] + {square}.bias")
    w.init.remove(f"{layer} = nn.Linear({d}, {e})")
    return form


@block(*LAST, weight=1.2, same=True)
def normalised(w: Writer, form: Form) -> Form:
    d = form.last
    options = [f"nn.LayerNorm({d})", f"nn.RMSNorm({d})", f"nn.LayerNorm({d}, elementwise_affine=False)"]
    if form.kind in ("vec", "fold", "major"):
        options += [f"nn.BatchNorm1d({d})", f"nn.GroupNorm(1, {d})", f"nn.BatchNorm1d({d}, affine=False)"]
    w.set(f"{w.module(w.rng.choice(options))}(h)")
    return form


@block(*LAST, weight=0.6, same=True)
def pieces(w: Writer, form: Form) -> Form:
    """Features cut up, changed in part, put together again."""
    d = form.last
    scale = w.weight(1)
    w.set(
        w.choose(
            f"torch.cat([h[..., :1] * {scale}, h[..., 1:]], -1)",
            f"torch.cat([part * {scale} for part in h.chunk(2, -1)], -1)",
            f"torch.stack([part.sin() + {scale} for part in h.unbind(-1)], -1)",
            f"torch.cat([h, h.tanh() * {scale}], -1)[..., {d // 2}:{d // 2 + d}]",
            f"h.index_add(-1, torch.tensor([0]), h[..., 1:2] * {scale})",
            f"h.scatter_add(-1, torch.zeros_like(h, dtype=torch.long), h * {scale})",
            f"h.index_copy(-1, torch.tensor([0]), (h[..., :1] * {scale}))",
        )
    )
    if w.chance(0.3):
        w.line("h = h.clone()")
        w.line(f"h[..., 0] = h[..., 0] * {w.weight(1)}")
    return form


@block(*LAST, "image", "map", weight=1.0, same=True)
def residual(w: Writer, form: Form) -> Form:
    if w.depth > 1:
        return smooth(w, form)
    kept = w.name("kept")
    w.depth += 1
    w.line(f"{kept} = h")
    same_form(w, form, w.choose(1, 2))
    gate = w.weight(1) if w.chance(0.4) else "0.5"
    w.set(
        w.choose(f"h + {kept}", f"{kept} + {gate} * h", f"{kept} * torch.sigmoid(h)", f"torch.add({kept}, h)")
    )
    w.depth -= 1
    return form


@block(*LAST, "image", "map", weight=0.7, same=True)
def checkpointed(w: Writer, form: Form) -> Form:
    return in_a_method(w, form, lambda name: f"checkpoint({name}, h, use_reentrant=False)")


@block(*LAST, "image", "map", weight=0.5, same=True)
def called_twice(w: Writer, form: Form) -> Form:
    return in_a_method(
        w, form, lambda name: f"{name}({name}(h))" if w.chance(0.5) else f"{name}(h) + {name}(0.5 * h)"
    )


def in_a_method(w: Writer, form: Form, call: Callable[[str], str]) -> Form:
    """One or two blocks in a method of their own, which is then called."""
    if w.depth > 0 or not form.leading:
        return raw_scale(w, form)
    w.depth += 1
    with w.method() as name:
        same_form(w, form, w.choose(1, 2))
    w.set(call(name))
    w.depth -= 1
    return form
