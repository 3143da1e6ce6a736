"""Calls of modules are kept while extensions need them, and no longer."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch.nn.functional as F
from torch import nn

import packprop
from packprop import compat
from packprop.compat.own import BackpropExtension
from packprop.errors import PackpropError
from tests.compat.module_extensions import Fourth, run
from tests.compat.programs import installed, mlp, near, vectors


@installed
def test_a_hook_sees_every_module_once_where_only_own_extensions_run() -> None:
    model, (x, y) = mlp(), vectors()
    seen: list[str] = []

    def hook(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        for p in module.parameters(recurse=False):
            assert p.fourth.shape == p.shape

    run(model, x, y, Fourth(), hook=hook)
    assert seen == ["CrossEntropyLoss", "Linear", "Sigmoid", "Linear"]


@installed
def test_hooks_may_look_at_calls() -> None:
    Fourth()
    model, (x, y) = mlp(), vectors()
    seen = {}
    run(model, x, y, packprop.extensions.BatchGrad(), hook=lambda m: seen.update({m: m.input0.shape}))
    assert seen == {model[0]: (5, 4), model[2]: (5, 5)}
    assert not hasattr(model[0], "input0")


@installed
def test_calls_are_dropped_with_the_graph() -> None:
    from backpack import extend, memory_cleanup

    Fourth()
    model, (x, y) = extend(mlp()), vectors()
    loss = F.cross_entropy(model(x), y)
    assert model[0].output.shape == (5, 5)
    loss.backward(retain_graph=True)
    assert model[0].input0 is x
    loss.backward()
    assert not any(hasattr(child, name) for child in model for name in ("input0", "output"))
    model(x)
    for child in model:
        memory_cleanup(child)
    assert not any(hasattr(child, "output") for child in model)
    copy.deepcopy(model)


@installed
def test_a_graph_that_is_retained_serves_again() -> None:
    from backpack import backpack, extend

    model, (x, y) = extend(mlp()), vectors()
    Fourth()
    loss = extend(nn.CrossEntropyLoss())(model(x), y)
    found = []
    for retain in (True, True, False):
        with backpack(Fourth(), retain_graph=retain):
            loss.backward(retain_graph=retain)
        found.append(model[0].weight.fourth)
    near(found[0], found[2])
    assert not hasattr(model[0], "output")


@installed
def test_no_memory_stays() -> None:
    model, (x, y) = mlp(), vectors()
    loss = run(model, x, y, Fourth())
    alive = weakref.ref(loss)
    gc.disable()
    try:
        del loss
        assert alive() is None
    finally:
        gc.enable()


@installed
@pytest.mark.usefixtures("_nothing_kept")
def test_nothing_is_kept_before_an_extension_is_defined() -> None:
    from backpack import backpack, extend

    model, (x, y) = extend(mlp()), vectors()
    loss = F.cross_entropy(model(x), y)
    assert not hasattr(model[0], "output")

    class Late(BackpropExtension):
        pass

    with (
        pytest.raises(PackpropError, match="define the classes of extensions first"),
        backpack(Late("late", {}, "SILENT")),
    ):
        loss.backward()
    loss = F.cross_entropy(model(x), y)
    assert model[0].output.shape == (5, 5)


@pytest.mark.usefixtures("_nothing_kept")
def test_calls_are_kept_when_asked_for() -> None:
    assert compat.install(replace=True, keep_module_io=True)
    try:
        from backpack import extend

        model = extend(mlp())
        model(vectors()[0])
        assert model[0].output.shape == (5, 5)
    finally:
        compat.uninstall()
