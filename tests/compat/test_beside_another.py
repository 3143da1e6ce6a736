"""Beside a BackPACK that is installed, or where there is none."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import packprop
from packprop import compat
from packprop.errors import PackpropWarning


@pytest.fixture
def _other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of this name that is found first."""
    folder = tmp_path / "backpack"
    (folder / "extensions").mkdir(parents=True)
    (folder / "__init__.py").write_text("who = 'the other'\n")
    (folder / "extensions" / "__init__.py").write_text("who = 'its extensions'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "backpack"}
    yield
    compat.uninstall()
    for name in [name for name in sys.modules if name.split(".")[0] == "backpack"]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.usefixtures("_other")
def test_an_installed_one_is_left_alone() -> None:
    with pytest.warns(PackpropWarning, match=r"install\(replace=True\)"):
        assert not compat.install()
    assert not compat.is_installed()
    import backpack

    assert backpack.who == "the other"


def test_where_none_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "backpack"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    try:
        assert compat.install()
        from backpack.extensions import BatchGrad

        assert issubclass(BatchGrad, packprop.extensions.BatchGrad)
    finally:
        compat.uninstall()
        sys.modules.update(before)


@pytest.mark.usefixtures("_other")
def test_an_installed_one_is_replaced_and_comes_back() -> None:
    import backpack as before
    import backpack.extensions as inner

    assert compat.install(replace=True)
    assert compat.install()  # again: nothing changes
    import backpack as during
    from backpack.extensions import BatchGrad

    assert not hasattr(during, "who")
    assert issubclass(BatchGrad, packprop.extensions.BatchGrad)
    compat.uninstall()
    compat.uninstall()
    import backpack as after

    assert after is before
    assert sys.modules["backpack.extensions"] is inner
