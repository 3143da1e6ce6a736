"""What `import packprop` brings with it, told by the modules that are there afterwards; nothing is timed."""

from __future__ import annotations

import ast
import gc
import json
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import packprop
from tests.house.pages import ROOT
from tests.selection import thorough

SOURCE = ast.parse(Path(packprop.__file__).read_text(encoding="utf-8"))

STEPS = (
    "import packprop",
    "import torch",
    "from packprop import backpack, extend, extensions",
)
CHILD = """
import json, sys
for step in {steps!r}:
    before = set(sys.modules)
    exec(step)
    print(json.dumps(sorted(set(sys.modules) - before)))
"""


def imported_for_type_checkers() -> dict[str, str]:
    """Each name under `if TYPE_CHECKING:`, and the module that it is, or comes from."""
    block = next(node for node in SOURCE.body if isinstance(node, ast.If))
    found = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom), ast.unparse(node)
        for alias in node.names:
            # compat/paths is on the package's path, which type checkers do not know
            inner = f"{node.module}.{alias.name}".replace("packprop.compat.paths.", "packprop.")
            there = isinstance(packprop._MODULES.get(alias.name), str)
            found[alias.name] = inner if there else str(node.module)
    return found


@pytest.fixture(scope="module")
def new_modules() -> list[list[str]]:
    """What each of the steps imports, one after the other, in a process of their own."""
    command = [sys.executable, "-c", CHILD.format(steps=STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_package_alone_imports_nothing_else(new_modules: list[list[str]]) -> None:
    ours = [name for name in new_modules[0] if name.startswith("packprop")]
    assert ours == ["packprop"], (
        "a new public name goes into _HOMES of packprop/__init__.py, not into an import"
    )
    assert "torch" in new_modules[1], "torch was imported by packprop, not by the step after it"


def test_a_backward_pass_needs_no_tables_files_or_reports(new_modules: list[list[str]]) -> None:
    # older versions of torch import some libraries only when they are used
    assert not {name.partition(".")[0] for name in new_modules[2]} & {"numpy", "rich", "safetensors"}
    ours = {name.removeprefix("packprop.") for name in new_modules[2] if name.startswith("packprop.")}
    late = ("applications", "compat", "engine.eager", "examples", "monitor", "store", "testing")
    assert not [name for name in ours if name.startswith(late)]


def test_what_type_checkers_read_is_what_is_there() -> None:
    at_run_time = {**packprop._HOMES, **packprop._MODULES}
    assert imported_for_type_checkers() == at_run_time
    assert sorted(packprop.__all__) == sorted(at_run_time)


def test_the_version_is_that_of_the_project(new_modules: list[list[str]]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert packprop.__version__ == project["version"]
    assert "__version__" in dir(packprop)
    assert "importlib.metadata" not in new_modules[0], "the version is read when it is asked for"


@pytest.mark.parametrize("name", packprop.__all__)
def test_a_name_is_the_one_of_its_module(name: str) -> None:
    if name in packprop._MODULES:
        assert getattr(packprop, name) is import_module(packprop._MODULES[name])
    else:
        assert getattr(packprop, name) is getattr(import_module(packprop._HOMES[name]), name)
    assert name in dir(packprop)


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_left_as_it_was(collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(packprop), "Plan", raising=False)
    monkeypatch.setitem(packprop._HOMES, "Missing", "packprop.missing")
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        assert packprop.Plan.__name__ == "Plan"
        assert gc.isenabled() is collects
        with pytest.raises(ModuleNotFoundError):
            packprop.Missing  # noqa: B018  # asking for it is the test
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="'packprop' has no attribute 'bakpack'"):
        packprop.bakpack  # noqa: B018  # asking for it is the test
    assert not hasattr(packprop, "__wrapped__")


THREADS = """
import sys, threading
import torch, packprop
sys.setswitchinterval(1e-5)
names, failed = [*packprop._HOMES], []
together = threading.Barrier(len(names))

def ask(name):
    together.wait()
    try:
        getattr(packprop, name)
    except Exception as error:
        failed.append(repr(error))

threads = [threading.Thread(target=ask, args=(name,)) for name in names]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(failed)
"""


@thorough
def test_threads_may_ask_for_names_at_once() -> None:
    command = [sys.executable, "-c", THREADS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


@thorough
def test_imports_on_the_way_draw_nothing() -> None:
    """Libraries for output are imported where they are first needed, and rich draws a number then."""
    program = """
import random, torch
random.seed(0)
import packprop
before = random.getstate()
model = torch.nn.Linear(2, 2)
data = torch.randn(4, 2), torch.randint(2, (4,))
packprop.compute(model, torch.nn.CrossEntropyLoss(), data, packprop.extensions.Variance(), progress=False)
str(packprop.plan(model, torch.nn.CrossEntropyLoss(), data, packprop.extensions.Variance()))
assert random.getstate() == before
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    program = """
import random
from packprop.engine.tensors import plain_text
random.seed(0)
before = random.getstate()
plain_text("text", width=20)
assert random.getstate() == before
"""
    subprocess.run([sys.executable, "-c", program], check=True)
