"""Draws for losses, exactly: by enumerating everything that can be drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packprop
from packprop import extensions
from tests.references.running import assert_near


def enumerated_hessian(columns: Tensor, probabilities: Tensor) -> Tensor:
    """``sum_m p_m u_m u_m^T`` for draws ``[m, n, t, c]`` with probabilities ``[m, n, t]``."""
    return torch.einsum("mnt,mntc,mntd->ntcd", probabilities, columns, columns)


@pytest.mark.parametrize("spread", [1.0, 20.0, 200.0])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_columns_of_cross_entropy_are_exact_however_sure_the_model_is(classes: int, spread: float) -> None:
    from packprop.engine.functions.losses.roots import softmax_root

    logits, scale = spread * torch.randn(50, 2, classes).double(), torch.rand(50, 2).double()
    p = logits.softmax(-1)
    hessian = -p[..., :, None] * p[..., None, :]
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    diagonal.copy_(p * (p @ (1 - torch.eye(classes).double())))  # p (1 - p), without cancellation
    root = softmax_root(logits, scale)
    assert root.entrywise is not None
    for each in (root, root.entrywise):
        chunks = [(start, min(start + 4, each.columns)) for start in range(0, each.columns, 4)]
        found = torch.stack([torch.cat([each.position(t, *chunk) for chunk in chunks]) for t in range(2)], 2)
        squares = torch.einsum("kntc,kntd->ntcd", found, found)
        assert_near(squares, scale[..., None, None] * hessian, "the Hessian", 1e-14)
        if each is root:
            torch.testing.assert_close(
                found.square().sum(0), scale[..., None] * diagonal, rtol=1e-13, atol=1e-200
            )


def test_enumerated_categorical_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    from packprop.engine.functions.losses.roots import softmax_root

    logits, scale = torch.randn(2, 3, 4).double(), torch.rand(2, 3).double()
    p = logits.softmax(-1)

    def one_of_each(flat: Tensor, draws: int, **_: Any) -> Tensor:
        assert_near(flat, p.reshape(-1, 4), "the probabilities that are sampled from")
        return torch.arange(draws).expand(flat.shape[0], draws)

    monkeypatch.setattr(torch, "multinomial", one_of_each)
    columns = softmax_root(logits, scale).draw(4, None)
    expected = scale[..., None, None] * (torch.diag_embed(p) - p[..., :, None] * p[..., None, :])
    hessian = enumerated_hessian(columns, p.movedim(-1, 0))
    assert_near(hessian, expected, "the expected outer product")
    mean = torch.einsum("mnt,mntc->ntc", p.movedim(-1, 0), columns)
    assert_near(mean, torch.zeros_like(mean), "the expected draw", 1e-15, floor=1.0)


@pytest.mark.parametrize("classes", [257, 289, 300])
def test_enumerated_draws_of_many_classes(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block and then a class in it: together as likely as the class."""
    from packprop.engine.functions.losses.roots import drawn_classes

    p, steps = torch.randn(3, classes).double().mul(3).softmax(-1), []
    width = int(classes**0.5)
    for place in range(width):

        def at_place(given: Tensor, draws: int, place: int = place, **_: Any) -> Tensor:
            steps.append(given / given.sum(-1, keepdim=True))
            return (
                torch.arange(draws).expand(len(given), -1) if draws > 1 else torch.full((len(given), 1), place)
            )

        monkeypatch.setattr(torch, "multinomial", at_place)
        blocks = -(-classes // width)
        drawn = drawn_classes(p, blocks, None)
        block, inside = steps[-2:]
        wanted = torch.arange(blocks) * width + place
        there = (wanted < classes).expand_as(drawn)
        assert torch.equal(drawn, wanted.clamp(max=classes - 1).expand_as(drawn))
        likely = (block * inside[:, place].view_as(block))[there]
        assert_near(likely, p.gather(-1, drawn)[there], "how likely it is", 1e-13)
        assert (inside.view(3, blocks, width)[..., place][~there].nan_to_num() == 0).all()


def test_draws_of_many_classes_hit_what_is_likely() -> None:
    from packprop.engine.functions.losses.roots import drawn_classes

    p = torch.zeros(4, 1000)
    p[0, 999], p[1, 0], p[2, 500:502], p[3] = 1.0, 1.0, 0.5, torch.nan
    drawn = drawn_classes(p, 64, torch.Generator().manual_seed(0))
    assert (drawn[0] == 999).all()
    assert (drawn[1] == 0).all()
    assert set(drawn[2].tolist()) == {500, 501}
    assert ((drawn[3] >= 0) & (drawn[3] < 1000)).all()


@pytest.mark.parametrize("classes", [1024, 1025])
def test_draws_of_rows_that_are_not_finite(classes: int) -> None:
    """Any class is drawn, also where the last block would be empty."""
    from packprop.engine.functions.losses.roots import drawn_classes

    drawn = drawn_classes(torch.full((2, classes), torch.nan), 2000, torch.Generator().manual_seed(0))
    assert drawn.min() >= 0
    assert classes - 100 < drawn.max() < classes


def test_enumerated_bernoulli_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    from packprop.engine.functions.losses.roots import bernoulli_root

    logits, scale = torch.randn(2, 3, 1).double(), torch.rand(2, 3).double()
    q = logits.sigmoid()[..., 0]
    uniform = torch.stack([torch.zeros(2, 3, 1), torch.ones(2, 3, 1)]).double()
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: uniform)
    columns = bernoulli_root(logits, scale).draw(2, None)
    hessian = enumerated_hessian(columns, torch.stack([q, 1 - q]))[..., 0, 0]
    assert_near(hessian, scale * q * (1 - q), "the expected outer product")


def test_enumerated_random_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    from packprop.engine.functions.losses.roots import matrix_root

    factor = torch.randn(2, 3, 3).double()
    hessian = factor @ factor.mT
    signs = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3).double()  # [8, k]
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: signs[:, None].expand(8, 2, 3))
    columns = matrix_root(hessian, hessian.dtype).draw(8, None)
    weights = torch.full((8, 2, 1), 1 / 8).double()
    assert_near(enumerated_hessian(columns, weights)[:, 0], hessian, "the expected outer product")


def test_gaussian_draws_by_quadrature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes at plus and minus one integrate the square of a standard normal exactly."""
    from packprop.engine.functions.losses.roots import gaussian_root

    scale = torch.rand(2, 3).double()
    nodes = torch.stack([torch.ones(2, 3, 1), -torch.ones(2, 3, 1)]).double()
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: nodes)
    columns = gaussian_root(torch.zeros(2, 3, 1).double(), scale).draw(2, None)
    weights = torch.full((2, 2, 3), 0.5).double()
    hessian = enumerated_hessian(columns, weights)[..., 0, 0]
    assert_near(hessian, 2 * scale, "the expected outer product")


def test_small_curvature_of_a_loss_without_a_rule() -> None:
    """Entries far below the largest of the batch are there: single precision has room for both."""
    torch.manual_seed(0)
    classes = 300
    x, y = torch.randn(6, 4), torch.randint(classes, (6,))

    class Own(nn.Module):
        def forward(self, f: Tensor, target: Tensor) -> Tensor:
            return (f.logsumexp(1) - f.gather(1, target[:, None])[:, 0]).sum()

    found = []
    for loss in (Own(), nn.CrossEntropyLoss(reduction="sum")):
        torch.manual_seed(0)
        model = packprop.extend(nn.Linear(4, classes))
        with torch.no_grad():
            model.weight.mul_(6)
        value = packprop.extend(loss)(model(x), y)
        with packprop.backpack(extensions.DiagGGNExact()):
            value.backward()
        found.append(model.bias.diag_ggn_exact)
    assert float(((found[0] - found[1]) / found[1]).abs().max()) < 0.02
