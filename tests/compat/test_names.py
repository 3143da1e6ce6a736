"""Names of BackPACK: there, documented, or missing with a reason."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import packprop
from packprop import compat
from packprop.compat import catalogue
from packprop.compat.names import TABLE
from tests.compat.programs import PAGE, installed


def test_the_names_that_programs_are_known_to_use() -> None:
    """Names under the paths that tutorials and libraries import them from."""
    assert {
        *("backpack.backpack", "backpack.extend", "backpack.disable", "backpack.memory_cleanup"),
        *("backpack.convert_module_to_backpack", "backpack.context.CTX", "backpack.extensions.HMP"),
        *("backpack.extensions.firstorder.batch_grad.BatchGrad", "backpack.extensions.KFAC"),
        *("backpack.extensions.secondorder.diag_ggn.DiagGGNExact", "backpack.extensions.curvature.Curvature"),
        *("backpack.extensions.secondorder.diag_hessian.DiagHessian", "backpack.extensions.curvmatprod.GGNMP"),
        *("backpack.extensions.secondorder.hbp.HBP", "backpack.extensions.secondorder.hbp.KFRA"),
        *("backpack.extensions.secondorder.sqrt_ggn.SqrtGGNMC", "backpack.custom_module.slicing.Slicing"),
        *("backpack.custom_module.pad.Pad", "backpack.custom_module.permute.Permute"),
        *("backpack.custom_module.reduce_tuple.ReduceTuple", "backpack.custom_module.branching.Parallel"),
        *("backpack.custom_module.scale_module.ScaleModule", "backpack.custom_module.branching.SumModule"),
        *("backpack.custom_module.graph_utils.BackpackTracer", "backpack.utils.subsampling.subsample"),
        *("backpack.hessianfree.hvp.hessian_vector_product", "backpack.hessianfree.ggnvp.ggn_vector_product"),
        *("backpack.hessianfree.lop.L_op", "backpack.hessianfree.rop.R_op"),
        *("backpack.utils.convert_parameters.vector_to_parameter_list", "backpack.utils.kroneckers.inv_kfacs"),
        *("backpack.utils.examples.load_one_batch_mnist", "backpack.utils.kroneckers.kfacs_to_mat"),
        "backpack.core.derivatives.convnd.weight_jac_t_save_memory",
        "backpack.extensions.backprop_extension.BackpropExtension",
        "backpack.extensions.module_extension.ModuleExtension",
        "backpack.extensions.firstorder.base.FirstOrderModuleExtension",
    } <= {f"{module}.{name}" for module, names in TABLE.items() for name in names}


@installed
@pytest.mark.parametrize("module", TABLE)
def test_every_name_resolves(module: str) -> None:
    found = importlib.import_module(module)
    for name, value in TABLE[module].items():
        if value is catalogue and not catalogue.is_available(name):
            with pytest.raises(ImportError, match="this version of packprop does not have it"):
                getattr(found, name)
        elif value is catalogue:
            assert issubclass(getattr(found, name), getattr(packprop.extensions, name))
        else:
            assert getattr(found, name) is (getattr(value, name) if isinstance(value, ModuleType) else value)


def test_the_page_lists_every_name() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|", PAGE, re.MULTILINE)
    listed = {module: set(re.findall(r"`(\w+)`", names)) for module, names in rows}
    documented = {
        module.removeprefix("backpack."): {name for name in names if not name.startswith("_")}
        for module, names in TABLE.items()
    }
    assert {module: names for module, names in documented.items() if names} == {
        module: names for module, names in listed.items() if module in documented
    }


def test_the_page_lists_every_file() -> None:
    folder = Path(compat.__file__).parent
    files = {path.stem if path.suffix == ".py" else path.name for path in folder.iterdir()}
    there = {f"packprop.compat.{name}" for name in files if name.isidentifier() and not name.startswith("_")}
    listed = [row for row in PAGE.splitlines() if row.startswith("| `packprop.compat")]
    found = {name for row in listed for name in re.findall(r"`([\w.]+)`", row.split("|")[1])}
    assert found - {"packprop.compat"} == there
    assert "packprop.hessianfree" not in PAGE


def test_the_page_runs() -> None:
    names: dict[str, Any] = {}
    try:
        for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
            exec(compile(code, "docs/compat.md", "exec"), names)
    finally:
        compat.uninstall()
    assert "fourth" in names


@installed
def test_attributes_lead_to_modules() -> None:
    import backpack

    assert backpack.extensions.BatchGrad is backpack.extensions.firstorder.batch_grad.BatchGrad
    assert backpack.hessianfree.hvp.hessian_vector_product is packprop.compat.hessianfree.hessian_vector_product
    assert not hasattr(backpack, "__version__")
    namespace: dict[str, Any] = {}
    exec("from backpack.extensions.firstorder import *", namespace)
    assert "Variance" in namespace


@installed
def test_what_packprop_has_in_addition_is_there() -> None:
    from backpack.extensions import BatchDotGrad

    assert issubclass(BatchDotGrad, packprop.extensions.BatchDotGrad)


@installed
@pytest.mark.parametrize("name", ["core.derivatives.linear", "nothing"])
def test_inner_parts_are_missing(name: str) -> None:
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module(f"backpack.{name}")
    assert "packprop has rules for functions, not for layers" in str(error.value)
    assert "instead: use an extension" in str(error.value)


@installed
def test_looking_for_what_is_missing_finds_nothing() -> None:
    """``find_spec`` answers, where ``import`` raises; so does an import that a module of the program makes."""
    import importlib.util as looking

    assert looking.find_spec("backpack.core.derivatives.linear") is None
    assert looking.find_spec("backpack.nothing") is None
    assert looking.find_spec("backpack.extensions.firstorder") is not None
    assert looking.find_spec(".nothing", "backpack.utils") is None
    with pytest.raises(ModuleNotFoundError):
        looking.find_spec("backpack.nothing.more")
    with pytest.raises(ModuleNotFoundError, match="rules for functions"):
        import backpack.core.derivatives.linear  # noqa: F401  # refused before it has a name


@installed
def test_a_name_that_is_not_documented_is_missing() -> None:
    with pytest.raises(ImportError):
        from backpack import nothing_of_this_name  # noqa: F401  # importing it is the test
    import backpack.context

    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        backpack.context.nothing  # noqa: B018  # asking for it is the test


@installed
def test_a_missing_extension_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(packprop.extensions, "KFAC")
    compat.uninstall()
    compat.install(replace=True)
    with pytest.raises(ImportError) as error:
        from backpack.extensions import KFAC  # noqa: F401  # importing it is the test
    assert str(error.value).startswith("KFAC of backpack.extensions was asked for")
    assert "instead: choose from" in str(error.value)
    assert "BatchGrad" in str(error.value)
