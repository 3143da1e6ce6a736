"""The command on a terminal: its progress, an interrupt, colours; and where there is no terminal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import packprop
from packprop import Profile
from packprop.applications.dataset.progress import Meter
from tests.reports.factories import FACTORIES, Run
from tests.selection import thorough

SLOW = """
import time
from pathlib import Path

import torch
from torch import nn


class Batches:
    def __len__(self):
        return 60

    def __iter__(self):
        source = torch.Generator().manual_seed(0)
        for number in range(60):
            if Path("slowly").exists():  # and one batch long, so that an interrupt comes in time
                time.sleep(60 if number == 20 else 0.05)
            yield torch.randn(5, 4, generator=source), torch.randint(2, (5,), generator=source)


def factory():
    torch.manual_seed(0)
    return nn.Linear(4, 2), nn.CrossEntropyLoss(), Batches()
"""


def test_json_is_all_that_standard_output_gets(run: Run, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "print('imported')\n" + FACTORIES.replace("def good():", "def good():\n    print(1)")
    )
    status, out, err = run("loud:good", "--json")
    assert status == 0
    saved = json.loads(out)
    assert saved == json.loads((tmp_path / "profile" / "profile.json").read_text())
    assert saved["samples"] == 30
    assert "imported" in err
    assert "wrote profile/profile.json" in err


def test_a_meter_says_rate_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 10.0, 12.0])
    monkeypatch.setattr("packprop.applications.dataset.progress.time.perf_counter", lambda: next(now))
    sizes = iter([100 * 2**20, 150 * 2**20, 160 * 2**20])
    monkeypatch.setattr("packprop.applications.dataset.progress.resident_now", lambda: next(sizes))
    meter = Meter(600 * 2**20, torch.device("cpu"))
    assert meter.rate(128) == ""  # the first batch takes longer than others
    assert meter.rate(384) == ", 128 samples/s"
    assert meter.memory() == "memory +50 MiB of 600 MiB"
    unlimited = Meter.__new__(Meter)
    unlimited.__dict__ = {**vars(meter), "_budget": None}
    assert unlimited.memory() == "memory 160 MiB"


def test_memory_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packprop.applications.dataset.progress.resident_now", lambda: None)
    assert Meter(100, torch.device("cpu")).memory() == ""


def _listen_to_interrupts() -> None:
    """As in a terminal: what a shell starts in the background ignores interrupts, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """The command in a child process, whose standard error, or all of it, is a terminal of 120 columns."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        pty = pytest.importorskip("pty")
        self._own, other = pty.openpty()
        root = str(Path(packprop.__file__).parents[1])
        plain = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
        settings = {"PYTHONPATH": root, "COLUMNS": "120", "TERM": "xterm-256color"}
        command = [
            sys.executable,
            "-m",
            "packprop.applications.reports.cli",
            "profile",
            "--no-page",
            "--threads",
            "1",
        ]
        self.process = subprocess.Popen(
            [*command, *arguments],
            cwd=folder,
            env={**plain, **settings, **environment},
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            preexec_fn=_listen_to_interrupts,
        )
        os.close(other)
        self.seen = ""

    def read(self, until: str = "", seconds: float = 120.0) -> str:
        """What it writes until a pattern is there; without one, until it ends."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not (until and re.search(until, self.plain)):
            if not select.select([self._own], [], [], 0.2)[0]:
                continue
            try:
                data = os.read(self._own, 65536)
            except OSError:  # the other end was closed
                break
            if not data:
                break
            self.seen += data.decode(errors="replace")
        assert not until or re.search(until, self.plain), self.seen
        return self.plain

    @property
    def plain(self) -> str:
        """What it has written, without colours and movements of the cursor."""
        return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", self.seen)

    def close(self) -> int:
        status = self.process.wait(60)
        with contextlib.suppress(OSError):
            os.close(self._own)
        return status


@thorough
def test_an_interrupt_leaves_a_run_to_go_on_from_and_a_whole_terminal(run: Run, tmp_path: Path) -> None:
    """Ctrl-C in the middle of a run; the same command goes on, to the result of a run that was left alone."""
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "slowly").touch()
    options = ("slow:factory", "--checkpoint", "kept", "--every", "1", "--memory", "64MiB")
    terminal = Terminal(tmp_path, *options, NO_COLOR="1")
    terminal.read(until=r"\d+/60 batches, \d+ samples/s")
    os.killpg(terminal.process.pid, signal.SIGINT)
    seen = terminal.read()
    assert terminal.close() == 130
    assert re.search(r"memory \+\d.* of 64 MiB", seen)
    assert re.search(r"\d:\d\d", seen)  # the time left
    assert "interrupted; kept has the last checkpoint" in seen
    assert terminal.seen.count("\x1b[?25h") >= terminal.seen.count("\x1b[?25l") > 0  # the cursor is shown again
    assert not re.search(r"\x1b\[[0-9;]*3[1-8][0-9;]*m", terminal.seen)  # no colours
    assert "Traceback" not in seen
    assert not (tmp_path / "profile").exists()

    (tmp_path / "slowly").unlink()
    status, out, err = run("slow:factory", "--resume", "kept", "--memory", "64MiB")
    assert status == 0
    assert "300 samples in 60 batches" in out
    assert "batches," not in err  # no bar where there is no terminal
    found = Profile.load(tmp_path / "profile")
    assert run("slow:factory", "--memory", "64MiB")[0] == 0
    alone = Profile.load(tmp_path / "profile")
    assert (found.layers, found.loss) == (alone.layers, alone.loss)


def test_help_says_how_commands_end(capfd: pytest.CaptureFixture[str]) -> None:
    from packprop.applications.reports import cli

    for command in ("profile", "compare", "page"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        assert "0 done, 1 an error inside packprop, 2 wrong input, 130 interrupted" in capfd.readouterr().out
