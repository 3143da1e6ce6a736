"""Programs that were changed between two calls: a run goes on only with what it was begun with, by name."""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.text
import torch
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from packprop import BadInput, PackpropWarning
from packprop.applications.dataset.code import version_of
from packprop.applications.dataset.data_facts import loader_facts
from packprop.applications.dataset.describing import Describer
from packprop.applications.dataset.identity import difference
from tests.selection import often, one_in, thorough

PROGRAM = '''
import enum
import functools
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import packprop
from packprop.engine.algebra.structures import rows as gradients
from packprop.extensions import Extension, Variance
from packprop.types import GRADIENT, Row

SCALE, KNOWN, WORDS = 2.0, {"factor": 1.0}, {"b", "a", "c"}


class Kind(enum.Enum):
    FAST = 1.5


class Factor:
    def __init__(self):
        self.by = 1.0

    def __get__(self, owner, kind):
        return 1.0 * 1

    def __rmul__(self, x):
        return self.by * x


@functools.lru_cache
def remembered(x):
    return x * 1.0


@functools.singledispatch
def dispatched(x):
    return x * 1.0


def counted(x):
    counted.calls += 1
    return x * counted.by


counted.calls, counted.by = 0, 1.0


class Options:
    """Options of a program."""

    def __init__(self):
        self.slope, self.folder = 0.1, "first"

    def slope_at(self, x):
        return self.slope


options = Options()


def helper(x):
    """What a helper says of itself."""
    parts = [each for each in (x, x * SCALE) if KNOWN["factor"] in {1.0, 2.0, "text"}]
    return parts[-1] * options.slope_at(x)


def inside(inputs, which=3):
    def innermost(x):
        return x * which + 0 * len(WORDS)

    return innermost(inputs)


class Base(nn.Module):
    def inner(self, x):
        return x + 1


class Net(Base):
    got = Factor()
    power = 1.0
    own = staticmethod(lambda x: x * 1)

    def __init__(self):
        super().__init__()
        self.first, self.act, self.soft = nn.Linear(3, 4), nn.Tanh(), nn.Softplus(1)
        self.last, self.chosen = nn.Linear(4, 2), F.relu
        self.scale, self._hidden, self.widths = 1.5, 0.5, [4, 2]
        self.name, self.calls, self.seen = "net", 0, []
        self.register_buffer("shift", torch.zeros(4), persistent=False)
        self.table = torch.ones(4)
        self.kind, self.by, self._far = Kind.FAST, Factor(), 1.0

    @property
    def factor(self):
        return self.scale * 2

    def inner(self, x):
        return super().inner(x) * self._hidden

    def forward(self, x):
        self.calls += 1
        self.seen.append(len(x))
        x = self.got * remembered(1.0) * dispatched(counted(x)) * self.kind.value
        x = x * self.by * getattr(self, "_f" + "ar")
        middle = self.soft(self.act(self.first(helper(inside(x))))) * self.factor * self.power + self.shift
        return self.last(self.chosen(self.own(self.inner(middle))) * self.table)

    def report(self):
        return "nothing"


class Changed:
    """A transform."""

    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x * self.by


class Data(Dataset):
    def __init__(self, offset=0.0):
        source = torch.Generator().manual_seed(7)
        self.x, self.y = torch.randn(23, 3, generator=source) + offset, torch.arange(23) % 2
        self.transform, self.noise, self.file, self.cache, self.reads = Changed(1.0), 0.1, None, {}, 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.reads += 1
        self.file = self.file or object()
        self.cache[index] = self.reads
        return self.transform(self.x[index]) + self.noise * torch.randn(3), int(self.y[index])


class Summed(Extension):
    savefield = "summed"
    rows = (Row(GRADIENT, lambda structure: gradients(structure).sum((0, 1)) * 2),)


def loss(outputs, targets, smoothing=0.0):
    return F.cross_entropy(outputs * SCALE, targets, label_smoothing=smoothing)


def collated(batch):
    return torch.stack([x for x, _ in batch]), torch.tensor([y for _, y in batch])


class Losses:
    def __init__(self):
        self.temperature, self.run = 1.0, "one"

    def value(self, outputs, targets):
        return F.cross_entropy(outputs / self.temperature, targets)


def closed_over(margin):
    return lambda outputs, targets: F.cross_entropy(outputs + margin, targets)


def hooked(module, args):
    return (args[0] * 1.0,)


def call(folder, form, which):
    torch.manual_seed(0)
    model, data, given = Net(), Data(), loss
    if which == "partial":
        given = functools.partial(loss, smoothing=0.1)
    elif which == "method":
        given = Losses().value
    elif which == "closure":
        given = closed_over(0.5)
    elif which == "module":
        given = nn.CrossEntropyLoss(label_smoothing=0.1)
    elif which == "hooked":
        model.first.register_forward_pre_hook(hooked)
    batches, size = data, 5
    if form == "loader":
        batches, size = DataLoader(data, 5, shuffle=False, collate_fn=collated), None
    elif form == "list":
        batches, size = [(data.x[:9], data.y[:9]), (data.x[9:], data.y[9:])], None
    elif form == "tensors":
        batches = TensorDataset(data.x, data.y)
    asked = [Variance(), Summed()]
    return packprop.compute(model, given, batches, asked, batch_size=size, checkpoint=folder, progress=False)
'''

DATA, LOADER, LIST, TENSORS = "data set", "loader", "list", "tensors"
CHANGES: list[tuple[str, str, str, str, str]] = [
    ("nn.Tanh()", "nn.ReLU()", "its modules: act: Tanh became ReLU", DATA, ""),
    ("nn.Softplus(1)", "nn.Softplus(5)", "soft: beta: 1 there, 5 here", DATA, ""),
    ("self.scale, self._hidden, self.widths = 1.5", "self.scale, self._hidden, self.widths = 2.5",
     "the model: scale: 1.5 there, 2.5 here", DATA, ""),
    ("= 1.5, 0.5", "= 1.5, 0.25", "_hidden: 0.5 there, 0.25 here", DATA, ""),
    ("[4, 2]\n", "[4, 3]\n", "widths: 2 there, 3 here", DATA, ""),
    ("power = 1.0", "power = 2.0", "Net.power: 1.0 there, 2.0 here", DATA, ""),
    ("lambda x: x * 1)", "lambda x: x * 2)", "Net.own: its code differs", DATA, ""),
    ("return self.scale * 2", "return self.scale * 3", "Net.factor: its code differs", DATA, ""),
    ("return x + 1", "return x + 2", "Base.inner: its code differs", DATA, ""),
    ("return super().inner(x)", "return -super().inner(x)", "Net.inner: its code differs", DATA, ""),
    ("self.act(self.first", "self.soft(self.first", "Net.forward: its code differs", DATA, ""),
    ("F.relu\n", "F.gelu\n", "chosen: torch.nn.functional.relu there", DATA, ""),
    ("torch.zeros(4)", "torch.full((4,), 0.1)", "buffers: shift", DATA, ""),
    ("torch.ones(4)", "torch.full((4,), 0.1)", "the model: table", DATA, ""),
    ("parts[-1]", "parts[0]", "helper: its code differs", DATA, ""),
    ("SCALE, KNOWN, WORDS = 2.0", "SCALE, KNOWN, WORDS = 3.0", "SCALE: 2.0 there, 3.0 here", DATA, ""),
    ('{"factor": 1.0}', '{"factor": 2.0}', "KNOWN: factor: 1.0 there, 2.0 here", DATA, ""),
    ('"a", "c"}', '"a"}', "WORDS: ['a', 'b', 'c'] there, ['a', 'b'] here", DATA, ""),
    ("self.folder = 0.1", "self.folder = 0.2", "options: slope: 0.1 there, 0.2 here", DATA, ""),
    ("return self.slope\n", "return -self.slope\n", "Options.slope_at: its code differs", DATA, ""),
    ("which=3", "which=4", "inside: defaults: 3 there, 4 here", DATA, ""),
    ("x * which +", "x + which +", "inside: its code differs", DATA, ""),
    ('2.0, "text"}', '2.0, "other"}', "helper: its code differs", DATA, ""),
    ("args[0] * 1.0", "args[0] * 2.0", "hooks: its code differs", DATA, "hooked"),
    ("outputs * SCALE", "outputs + SCALE", "its loss: its code differs", DATA, ""),
    ("smoothing=0.0", "smoothing=0.1", "its loss: defaults: 0.0 there, 0.1 here", DATA, ""),
    ("smoothing=0.1)\n    elif which == \"method", "smoothing=0.2)\n    elif which == \"method",
     "its loss: keywords: smoothing: 0.1 there, 0.2 here", DATA, "partial"),
    ("self.run = 1.0", "self.run = 2.0", "temperature: 1.0 there, 2.0 here", DATA, "method"),
    ("outputs / self", "outputs * self", "Losses.value: its code differs", DATA, "method"),
    ("closed_over(0.5)", "closed_over(0.6)", "its loss: names: margin: 0.5 there, 0.6 here", DATA, "closure"),
    ("label_smoothing=0.1)\n", "label_smoothing=0.2)\n", "label_smoothing: 0.1 there", DATA, "module"),
    ("* 2),)", "* 3),)", "its extensions: ", DATA, ""),
    ("data, given = Net(), Data()", "data, given = Net(), Data(1.0)", "its batches: ", DATA, ""),
    ("data, given = Net(), Data()", "data, given = Net(), Data(1.0)", "its batches: ", LOADER, ""),
    ("data, given = Net(), Data()", "data, given = Net(), Data(1.0)", "its batches: some values", LIST, ""),
    ("data, given = Net(), Data()", "data, given = Net(), Data(1.0)", "its data: some values", TENSORS, ""),
    ("Changed(1.0)", "Changed(2.0)", "transform: by: 1.0 there, 2.0 here", DATA, ""),
    ("return x * self.by", "return x + self.by", "Changed.__call__: its code differs", LOADER, ""),
    ("reads = Changed(1.0), 0.1", "reads = Changed(1.0), 0.2", "noise: 0.1 there, 0.2 here", DATA, ""),
    ("int(self.y[index])", "1 - int(self.y[index])", "Data.__getitem__: its code differs", DATA, ""),
    ("shuffle=False", "shuffle=True", "SequentialSampler became RandomSampler", LOADER, ""),
    ("DataLoader(data, 5", "DataLoader(data, 6", "batch size: 5 there, 6 here", LOADER, ""),
    ("torch.stack([x for", "torch.stack([-x for", "collate_fn: its code differs", LOADER, ""),
    ("batches, size = data, 5", "batches, size = data, 6", "samples in a batch: 5 there, 6 here", DATA, ""),
    ("FAST = 1.5", "FAST = 2.5", "kind: 1.5 there, 2.5 here", DATA, ""),
    ("return 1.0 * 1\n", "return 2.0 * 1\n", "Factor.__get__: its code differs", DATA, ""),
    ("return self.by * x", "return self.by + x", "Factor.__rmul__: its code differs", DATA, ""),
    ("ered(x):\n    return x * 1.0", "ered(x):\n    return x * 2.0", "remembered: wrapped: ", DATA, ""),
    ("atched(x):\n    return x * 1.0", "atched(x):\n    return x * 2.0", "dispatched: ", DATA, ""),
    ("counted.by = 0, 1.0", "counted.by = 0, 2.0", "counted: by: 1.0 there, 2.0 here", DATA, ""),
    ("Factor(), 1.0\n", "Factor(), 2.0\n", "_far: 1.0 there, 2.0 here", DATA, ""),
]  # fmt: skip

HARMLESS = [
    ("", ""),
    ("counted.by = 0, 1.0", "counted.by = 7, 1.0"),
    ("import sys\n", "import sys\n\n\n# a comment\n\n"),
    ('    """What a helper says of itself."""\n', '    """Something else."""\n'),
    ('    """What a helper says of itself."""\n', ""),
    ("middle", "renamed"),
    ('return "nothing"', 'return "something"'),
    ('"first"', '"second"'),
    ('self.run = 1.0, "one"', 'self.run = 1.0, "two"'),
]


def call(text: str, folder: Path, form: str = DATA, which: str = "", file: str = "program.py") -> Any:
    space: dict[str, Any] = {"__name__": Path(file).stem}
    exec(compile(text, file, "exec"), space)
    return space["call"](folder, form, which)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders of runs of the program as it is, by the form of the data and the loss."""
    folders: dict[tuple[str, str], Path] = {}

    def folder(form: str, which: str) -> Path:
        if (form, which) not in folders:
            folders[form, which] = tmp_path_factory.mktemp("begun")
            call(PROGRAM, folders[form, which], form, which)
        return folders[form, which]

    return folder


@one_in(3)
@pytest.mark.parametrize(("old", "new", "said", "form", "which"), CHANGES)
def test_a_changed_program_is_refused(
    old: str, new: str, said: str, form: str, which: str, begun: Any, tmp_path: Path
) -> None:
    folder = shutil.copytree(begun(form, which), tmp_path / "kept")
    assert PROGRAM.count(old) >= 1
    with pytest.raises(BadInput, match="belongs to something else") as error:
        call(PROGRAM.replace(old, new), folder, form, which)
    assert said in error.value.why


@often(lambda form, which, old, new: form == DATA)
@pytest.mark.parametrize(("old", "new"), HARMLESS)
@pytest.mark.parametrize(("form", "which"), [(DATA, "method"), (LOADER, "closure"), (TENSORS, "hooked")])
def test_what_changes_no_value_is_not_refused(
    old: str, new: str, form: str, which: str, begun: Any, tmp_path: Path
) -> None:
    folder = shutil.copytree(begun(form, which), tmp_path / "kept")
    assert PROGRAM.count(old) >= 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", PackpropWarning)
        call(PROGRAM.replace(old, new), folder, form, which, file="elsewhere.py")


@thorough
@pytest.mark.parametrize("form", [DATA, LOADER])
def test_another_process_goes_on(form: str, begun: Any, tmp_path: Path) -> None:
    """With another order of sets, in another folder, from a file of another name."""
    folder = shutil.copytree(begun(form, ""), tmp_path / "kept")
    file = tmp_path / "another.py"
    file.write_text(f"{PROGRAM}\ncall(sys.argv[1], sys.argv[2], '')\n")
    for seed in ("1", "2"):
        found = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-W", "error::packprop.PackpropWarning", str(file), str(folder), form]
        done = subprocess.run(command, env=found, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_the_same_objects_go_on_in_the_same_process(tmp_path: Path) -> None:
    """What is filled, counted and opened on the way is no option."""
    space: dict[str, Any] = {"__name__": "program"}
    exec(compile(PROGRAM, "program.py", "exec"), space)
    model, data = space["Net"](), space["Data"]()
    for _ in range(2):
        space["packprop"].compute(
            model, space["loss"], data, [space["Variance"]()], checkpoint=tmp_path, progress=False
        )


def test_modes_of_hidden_modules_count() -> None:
    hidden = nn.Sequential(nn.Dropout())
    described = [Describer().of([hidden.train(mode)], "it") for mode in (True, False)]
    hidden.train()[0].eval()
    described.append(Describer().of([hidden], "it"))
    assert all(first != second for first, second in itertools.combinations(described, 2))


class Shortened(DataLoader[Any]):
    """A loader of the user's with options of its own."""

    def __init__(self, most: int) -> None:
        super().__init__(TensorDataset(torch.zeros(2000, 3)), batch_size=4)
        self.most, self.begun = most, 0

    def __iter__(self) -> Any:
        self.begun += 1
        return itertools.islice(super().__iter__(), self.most)


def loading(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(2000, 3)), **options)


ROWS = [*range(1500)]
LOADERS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "sampler, a list": lambda last: loading(sampler=[*ROWS, last]),
    "sampler, a range": lambda last: loading(sampler=range(last)),
    "sampler, an array": lambda last: loading(sampler=np.array([0, last])),
    "batch_sampler, a list": lambda last: loading(batch_sampler=[[1, 2], [3, last]]),
    "indices of a sampler": lambda last: loading(sampler=SubsetRandomSampler([*ROWS, last, *ROWS])),
    "a loader of one's own": Shortened,
}


@pytest.mark.parametrize("which", LOADERS)
def test_options_of_loaders_are_compared(which: str) -> None:
    """As wholes: not by some entries of a long list."""
    loaders = [LOADERS[which](last) for last in (7, 7, 8)]
    [*loaders[1]]  # what a loader counts is no option
    one, same, other = ({"batches": loader_facts(each, Describer())} for each in loaders)
    assert difference(one, same) is None
    assert difference(one, other) is not None


def test_loaders_and_samplers_of_other_packages_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shortened, "__module__", "rich.text")
    describer = Describer()
    loader_facts(Shortened(7), describer)
    assert describer.untold == ["the loader"]


def test_random_states_are_left_alone(tmp_path: Path) -> None:
    """To look at samples draws no number that a run would draw, nor one of a generator of the data's own."""
    space: dict[str, Any] = {"__name__": "program"}
    exec(compile(PROGRAM, "program.py", "exec"), space)

    class Drawing(space["Data"]):  # type: ignore[misc]  # a class that is made here
        def __init__(self) -> None:
            super().__init__()
            self.source = torch.Generator().manual_seed(3)

        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return x + torch.randn(3, generator=self.source), y

    for kind in (space["Data"], Drawing):
        found = []
        for options in ({}, {"checkpoint": tmp_path / kind.__name__}):
            torch.manual_seed(1)
            result = space["packprop"].compute(
                space["Net"](), space["loss"], kind(), [space["Variance"]()], progress=False,
                compiled=False, **options)  # fmt: skip
            found.append((result.loss, torch.rand(2).tolist()))
        assert found[0] == found[1]


def test_what_cannot_be_told_is_said(tmp_path: Path) -> None:
    """Once, when a run goes on: not when it begins."""
    changed = PROGRAM.replace("self.table = ", "self.counter = iter([1])\n        self.table = ")
    with warnings.catch_warnings():
        warnings.simplefilter("error", PackpropWarning)
        call(changed, tmp_path)
    with pytest.warns(PackpropWarning, match="cannot tell whether these have changed.*: counter of") as said:
        call(changed, tmp_path)
    assert len([each for each in said if issubclass(each.category, PackpropWarning)]) == 1


def test_what_cannot_be_told_in_long_lists_is_said(tmp_path: Path) -> None:
    """Of a list of more than 1,024 entries some stand for all."""
    changed = PROGRAM.replace("self.table = ", "self.counters = [iter([1])] * 2000\n        self.table = ")
    call(changed, tmp_path)
    with pytest.warns(PackpropWarning, match="cannot tell whether these have changed.*: counters of"):
        call(changed, tmp_path)


def test_another_precision_is_refused(tmp_path: Path) -> None:
    call(PROGRAM, tmp_path)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(BadInput, match="its precision: autocast on cpu"):
        call(PROGRAM, tmp_path)


def test_versions_of_classes_in_a_long_list() -> None:
    describer = Describer()
    describer.of([rich.text.Text("a")] * 2000, "a list")
    assert "rich" in describer.versions


@pytest.mark.parametrize("known", ["by itself", "by its distribution", "not"])
def test_versions_of_installed_code(known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a package that says none, the one that it was installed in; else it is said that nobody knows it."""
    site, name = tmp_path / "site-packages", f"installed_{known.replace(' ', '_')}"
    facts = site / f"{name}-1.0.dist-info"
    facts.mkdir(parents=True)
    (site / f"{name}.py").write_text("def times(x):\n    return x * 1.0\n")
    monkeypatch.syspath_prepend(site)
    changed = PROGRAM.replace("import packprop\n", f"import packprop\nfrom {name} import times\n", 1)
    changed = changed.replace("remembered(1.0)", "times(1.0)")

    def of_version(version: str) -> None:
        if known == "by itself":
            vars(sys.modules[name])["__version__"] = version
        elif known == "by its distribution":
            (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        version_of.cache_clear()

    importlib.import_module(name)
    of_version("1.0")
    call(changed, tmp_path / "kept")
    of_version("2.0")
    if known == "not":
        with pytest.warns(PackpropWarning, match=f"the version of {name}"):
            call(changed, tmp_path / "kept")
        return
    with pytest.raises(BadInput, match=f"versions of packages: {name}: 1.0 there, 2.0 here"):
        call(changed, tmp_path / "kept")
