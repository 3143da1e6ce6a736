"""Blocks on more than the last axis: sequences, images, recurrence, attention, and moves between forms."""

from __future__ import annotations

from tests.hunt.writing import Form, Writer, block

WHOLE_SAMPLE = (
    "h + {flat}.view_as(h[0])",
    "h * {flat}.reshape_as(h[0])",
    "h * {full}.expand_as(h)",
    "h + {full}.unsqueeze(0).expand_as(h)",
    "h + {full}.expand(n, {holes})",
    "h * {full}.repeat(n, {ones})",
    "torch.stack([h, {full}.expand_as(h)], 1).sum(1)",
    "h + {full}[None].type_as(h)",
    "torch.stack([a * {full} for a in h.unbind(0)])",
    "torch.cat([a * {full} for a in h.split(1)])",
    "h * {full} + h.flatten(1).mean(1).view(n, {ones})",
    "torch.where(h > 0, h, {full})",
)


@block("vec", "seq", "map", "image", weight=1.2, same=True)
def raw_whole(w: Writer, form: Form) -> Form:
    """A parameter with the shape of one sample."""
    text, numel = w.choose(*WHOLE_SAMPLE), 1
    for extent in form.dims:
        numel *= extent
    made = {"full": w.weight(*form.dims)} if "{full}" in text else {"flat": w.weight(numel)}
    holes, ones = ", ".join("-1" for _ in form.dims), ", ".join("1" for _ in form.dims)
    w.set(text.format(**made, holes=holes, ones=ones))
    return form


@block("seq", weight=0.8)
def raw_bmm(w: Writer, form: Form) -> Form:
    t, d = form.dims
    e = w.size()
    p = w.weight(d, e)
    w.set(
        w.choose(
            f"torch.bmm(h, {p}.expand(n, -1, -1))",
            f"torch.baddbmm({w.weight(e)}.expand(n, {t}, {e}), h, {p}.expand(n, {d}, {e}))",
            f"torch.einsum('nti,io->nto', h, {p})",
            f"torch.einsum('io,nti->not', {p}, h).transpose(1, 2)",
            f"torch.bmm({w.weight(t, t)}.expand(n, -1, -1), h) @ {p}",
        )
    )
    return Form("seq", (t, e))


@block("seq", weight=0.7)
def prefix(w: Writer, form: Form) -> Form:
    """A class token, learned positions, or more features for everybody."""
    t, d = form.dims
    w.set(f"torch.cat([{w.weight(1, 1, d)}.expand(n, 1, {d}), h], 1)")
    return Form("seq", (t + 1, d))


@block("seq", "first", weight=0.6, same=True)
def over_time(w: Writer, form: Form) -> Form:
    axis = 1 if form.kind == "seq" else 0
    t = form.dims[0]
    p = w.weight(t, t)
    w.set(
        w.choose(
            f"h.flip({axis})",
            f"h.cumsum({axis})",
            f"h - h.mean({axis}, keepdim=True)",
            f"h.roll(1, {axis})",
            f"torch.einsum('{'nti' if axis else 'tni'},ts->{'nsi' if axis else 'sni'}', h, {p})",
            f"h.softmax({axis}) * {p}[0, 0]",
            f"torch.cat(h.chunk(2, {axis})[::-1], {axis})",
        )
    )
    return form


@block("seq", "first", weight=1.5)
def recurrent(w: Writer, form: Form) -> Form:
    t, d = form.dims
    axis, e = (1 if form.kind == "seq" else 0), 2
    flags = f"batch_first={form.kind == 'seq'}"
    layer = w.choose("LSTM", "GRU", "RNN")
    twice = w.chance(0.25)
    if layer == "LSTM" and w.chance(0.4):
        e, flags = 1, f"{flags}, proj_size=1"
    if layer == "RNN":
        flags += f", nonlinearity='{w.choose('tanh', 'relu')}'"
    made = w.module(f"nn.{layer}({d}, 2, {flags}{', bidirectional=True' if twice else ''})")
    both = 2 if twice else 1
    result = w.choose("outputs", "outputs", "last", "h", "c", "h and c", "outputs and h")
    state = "h, c" if layer == "LSTM" else "h"
    if layer != "LSTM" and "c" in result:
        result = "h"
    last = f"out[{':, ' if axis else ''}-1]"
    w.line(f"out, last = {made}(h)" if state == "h" else f"out, (last, cell) = {made}(h)")
    if result == "outputs":
        w.set("out")
        return Form(form.kind, (t, e * both))
    if result == "last":
        w.set(last)
        return Form("vec", (e * both,))
    if result == "outputs and h":
        w.set(f"out.mean({axis}) + torch.cat(list(last), -1)")
        return Form("vec", (e * both,))
    if result == "h":
        w.set(w.choose("torch.cat(list(last), -1)", "last.transpose(0, 1).flatten(1)"))
        return Form("vec", (e * both,))
    if result == "c":
        w.set("cell.transpose(0, 1).flatten(1)")
        return Form("vec", (2 * both,))
    w.set("torch.cat([*last, *cell], -1)")
    return Form("vec", ((e + 2) * both,))


@block("seq", "first", weight=0.8)
def cell_loop(w: Writer, form: Form) -> Form:
    d = form.last
    kind = w.choose("LSTMCell", "GRUCell", "RNNCell")
    made = w.module(f"nn.{kind}({d}, 2)")
    state, outs = w.name("state"), w.name("outs")
    start = (
        w.choose("None", f"{w.weight(2)}.expand(n, 2)", "torch.zeros(n, 2)") if kind != "LSTMCell" else "None"
    )
    w.line(f"{state}, {outs} = {start}, []")
    w.line(f"for step in h.unbind({1 if form.kind == 'seq' else 0}):")
    w.line(f"    {state} = {made}(step, {state})")
    value = f"{state}[0]" if kind == "LSTMCell" else state
    w.line(f"    {outs}.append({value})")
    if w.chance(0.4):
        w.set(f"{outs}[-1]" if kind != "LSTMCell" or w.chance(0.5) else f"{state}[1]")
        return Form("vec", (2,))
    w.set(f"torch.stack({outs}, {1 if form.kind == 'seq' else 0})")
    return form.with_last(2)


@block("seq", weight=1.0)
def attention_by_hand(w: Writer, form: Form) -> Form:
    t, d = form.dims
    q, k, v = (w.module(f"nn.Linear({d}, 2)") for _ in range(3))
    w.line(f"scores = {q}(h) @ {k}(h).transpose(1, 2)")
    if w.chance(0.4):
        w.line(f"scores = scores.masked_fill(torch.ones({t}, {t}).triu(1) > 0, float('-inf'))")
    w.set(w.choose(f"scores.softmax(-1) @ {v}(h)", f"torch.einsum('nts,nsd->ntd', scores.softmax(-1), {v}(h))"))
    return Form("seq", (t, 2))


@block("seq", weight=0.8)
def attention_fused(w: Writer, form: Form) -> Form:
    t, d = form.dims
    made = w.module(f"nn.Linear({d}, 12)")
    w.line(f"q, k, v = {made}(h).view(n, {t}, 3, 2, 2).permute(2, 0, 3, 1, 4)")
    mask = w.choose("", ", is_causal=True", f", attn_mask={w.weight(t, t)}")
    w.set(f"F.scaled_dot_product_attention(q, k, v{mask}).transpose(1, 2).reshape(n, {t}, 4)")
    return Form("seq", (t, 4))


@block("seq", "first", weight=0.5, same=True)
def attention_module(w: Writer, form: Form) -> Form:
    d = form.last
    made = w.module(f"nn.MultiheadAttention({d}, 1, batch_first={form.kind == 'seq'})")
    w.set(f"{made}(h, h, h, need_weights={w.chance(0.5)})[0]")
    return form


@block("seq", weight=0.8)
def learned_queries(w: Writer, form: Form) -> Form:
    d = form.last
    q = w.weight(2, d)
    w.set(
        w.choose(
            f"({q} @ h.transpose(1, 2)).softmax(-1) @ h",
            f"F.scaled_dot_product_attention({q}.expand(n, 2, {d}), h, h)",
            f"torch.einsum('qd,ntd->nqt', {q}, h).softmax(-1) @ h",
        )
    )
    return Form("seq", (2, d))


@block("seq", weight=1.2)
def leave_sequence(w: Writer, form: Form) -> Form:
    t, d = form.dims
    way = w.choose("first", "fold", "mean", "max", "flat", "map", "last", "map")
    texts = {
        "first": "h.transpose(0, 1)",
        "fold": w.choose(f"h.reshape(-1, {d})", "h.flatten(0, 1)"),
        "mean": "h.mean(1)",
        "max": "h.max(1).values",
        "flat": "h.flatten(1)",
        "map": w.choose("h.transpose(1, 2)", "h.permute(0, 2, 1)"),
        "last": "h[:, -1]",
    }
    w.set(texts[way])
    forms = {
        "first": Form("first", (t, d)),
        "fold": Form("fold", (t, d)),
        "flat": Form("vec", (t * d,)),
        "map": Form("map", (d, t)),
    }
    return forms.get(way, Form("vec", (d,)))


@block("fold", weight=1.5)
def unfold_positions(w: Writer, form: Form) -> Form:
    t, d = form.dims
    w.set(
        w.choose(
            f"h.reshape(-1, {t}, {d})", f"h.view(h.shape[0] // {t}, {t}, {d})", f"h.unflatten(0, (-1, {t}))"
        )
    )
    return Form("seq", (t, d))


@block("major", weight=1.5)
def unfold_major(w: Writer, form: Form) -> Form:
    t, d = form.dims
    w.set(f"h.reshape({t}, -1, {d})")
    return Form("first", (t, d))


@block("first", weight=1.2)
def leave_time_first(w: Writer, form: Form) -> Form:
    t, d = form.dims
    way = w.choose("seq", "vec", "last", "major", "max")
    texts = {
        "seq": w.choose("h.transpose(0, 1)", "h.permute(1, 0, 2).contiguous()", "h.movedim(0, 1)"),
        "vec": "h.mean(0)",
        "last": "h[-1]",
        "major": f"h.reshape(-1, {d})",
        "max": "h.amax(0)",
    }
    w.set(texts[way])
    return Form({"seq": "seq", "major": "major"}.get(way, "vec"), (t, d) if way in ("seq", "major") else (d,))


@block("vec", weight=0.8)
def spread(w: Writer, form: Form) -> Form:
    d = form.last
    p = w.weight(2, d)
    w.set(
        w.choose(
            "torch.stack([h, h.tanh()], 1)",
            f"h.unsqueeze(1) * {p}",
            f"h[:, None].expand(n, 2, {d}) + {p}",
            "h.unsqueeze(1).repeat(1, 2, 1)",
            "h.repeat_interleave(2, 0).reshape(n, 2, -1)",
        )
    )
    return Form("seq", (2, d))


@block("vec", weight=0.4, same=True)
def with_itself(w: Writer, form: Form) -> Form:
    d = form.last
    made = w.module(f"nn.Bilinear({d}, {d}, {d})")
    w.set(w.choose(f"{made}(h, h.tanh())", f"(h[:, :, None] * h[:, None]) @ {w.weight(d)}"))
    return form


@block("map", weight=2.0)
def convolution(w: Writer, form: Form) -> Form:
    c, t = form.dims
    e = w.choose(2, 3)
    p = w.weight(e, c, 2)
    if w.chance(0.4):
        one = w.weight(1)
        w.set(
            w.choose(
                f"F.conv1d(h, {p}, {one}.expand({e}), padding=1)[..., :{t}]",
                f"F.conv1d(F.pad(h, (1, 0)), {p})",
                f"F.conv1d(F.pad(h, (1, 0), mode='circular'), {p} * {one})",
            )
        )
    else:
        options = w.choose(
            "3, padding=1", "1", "3, padding='same', bias=False", "3, padding=1, padding_mode='circular'"
        )
        kind = w.choose("Conv1d", "Conv1d", "ConvTranspose1d") if "'" not in options else "Conv1d"
        w.set(f"{w.module(f'nn.{kind}({c}, {e}, {options})')}(h)")
    return Form("map", (e, t))


@block("map", "image", weight=1.0, same=True)
def normalised_channels(w: Writer, form: Form) -> Form:
    c, dim = form.dims[0], len(form.dims) - 1
    options = [f"nn.GroupNorm(1, {c})", f"nn.BatchNorm{dim}d({c})", f"nn.GroupNorm({c}, {c})"]
    options.append(f"nn.InstanceNorm{dim}d({c}, affine=True)")
    options.append(f"nn.InstanceNorm{dim}d({c}, affine=True, track_running_stats=True)")
    w.set(f"{w.module(w.rng.choice(options))}(h)")
    return form


@block("map", weight=1.0)
def leave_map(w: Writer, form: Form) -> Form:
    c, t = form.dims
    way = w.choose("seq", "flat", "mean", "max")
    w.set({"seq": "h.transpose(1, 2)", "flat": "h.flatten(1)", "mean": "h.mean(2)", "max": "h.amax(2)"}[way])
    return Form("seq", (t, c)) if way == "seq" else Form("vec", (c * t if way == "flat" else c,))


@block("image", weight=2.0)
def convolution_2d(w: Writer, form: Form) -> Form:
    c, a, b = form.dims
    e = w.choose(1, 2)
    options = w.choose(
        "3, padding=1", "1", "3, padding=1, bias=False", "(1, 3), padding=(0, 1)", "3, padding='same'"
    )
    w.set(f"{w.module(f'nn.Conv2d({c}, {e}, {options})')}(h)")
    return Form("image", (e, a, b))


@block("image", weight=0.6, same=True)
def depthwise(w: Writer, form: Form) -> Form:
    c = form.dims[0]
    p = w.weight(c, 1, 3, 3)
    one = w.weight(1)
    w.set(
        w.choose(
            f"F.conv2d(h, {p}, padding=1, groups={c})",
            f"F.conv2d(h, {p}, {one}.expand({c}), padding=1, groups={c})",
        )
    )
    return form


@block("image", weight=0.5)
def pooled(w: Writer, form: Form) -> Form:
    c, a, b = form.dims
    if a < 2 or b < 2:
        return form
    w.set(
        w.choose("F.avg_pool2d(h, 2)", "F.max_pool2d(h, 2)", f"F.adaptive_avg_pool2d(h, ({a // 2}, {b // 2}))")
    )
    return Form("image", (c, a // 2, b // 2))


@block("image", weight=1.0)
def leave_image(w: Writer, form: Form) -> Form:
    c, a, b = form.dims
    way = w.choose("map", "seq", "flat", "mean")
    texts = {
        "map": "h.flatten(2)",
        "seq": "h.flatten(2).transpose(1, 2)",
        "flat": "h.flatten(1)",
        "mean": "h.mean((2, 3))",
    }
    w.set(texts[way])
    forms = {"map": Form("map", (c, a * b)), "seq": Form("seq", (a * b, c)), "flat": Form("vec", (c * a * b,))}
    return forms.get(way, Form("vec", (c,)))
