"""Logs for the numbers of a monitored step: a terminal, a file, TensorBoard, a function."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from packprop.applications.reports.profile.files import json_ready
from packprop.errors import BadInput, install
from packprop.monitor.identifiers import plain

Values = dict[str, Any]
"""Numbers by the names of quantities, or ``None``; a list for ``"outliers"``."""

Log = Callable[[Values, int], object]
"""A function of the values of a step and its number."""

ASKED = "packprop.Monitor(log=...) was made."
CHOICES = (
    "give 'print', a file name that ends in .jsonl, a SummaryWriter, packprop.monitor.TensorBoard(folder), a "
    "function of a dictionary and a step, or a list of these"
)


class JsonLines:
    """Adds one line to a file for each monitored step: an object with ``"step"`` and the values.

    Args:
        path: The file. New lines come after those that it has.

    Raises:
        BadInput: If it is a folder, or in a folder that does not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        if self._path.is_dir():
            raise BadInput(ASKED, f"log={str(path)!r}", "it is a folder", "give the name of a file in it")
        if not self._path.parent.is_dir():
            raise BadInput(
                ASKED,
                f"log={str(path)!r}",
                f"there is no folder {str(self._path.parent)!r}",
                "make that folder first",
            )

    def __call__(self, values: Values, step: int) -> None:
        """Write a line; begin a new one if the file ends within one, as a kill or a full disk leaves it."""
        line = json.dumps(json_ready({"step": step, **values}), default=_written, allow_nan=False)
        cut = self._path.is_file() and not _ends_with_a_line(self._path)
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n" * cut + line + "\n")


def _ends_with_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        return not file.seek(0, os.SEEK_END) or (file.seek(-1, os.SEEK_END) >= 0 and file.read() == b"\n")


def _written(name: Any) -> Any:
    """Return numbers in place of a tensor or an array, and the text of other objects that JSON cannot hold."""
    numbers = plain(name)
    return str(name) if numbers is name else numbers


class TensorBoard:
    """Writes scalars for TensorBoard: event files in a folder; outliers become text.

    Args:
        folder: The folder of event files; or an existing ``SummaryWriter``.
        prefix: The prefix of the names of quantities.

    Raises:
        BadInput: If TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path | Any, prefix: str = "monitor/") -> None:
        self._prefix = prefix
        self._writer: Any = folder
        if isinstance(folder, (str, Path)):
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise BadInput(
                    f"packprop.monitor.TensorBoard({str(folder)!r}) was made.",
                    "the package tensorboard",
                    f"it cannot be imported: {error}",
                    f"{install('tensorboard')}, or log to a file: log='monitor.jsonl'",
                ) from error
            self._writer = SummaryWriter(str(folder))

    def __call__(self, values: Values, step: int) -> None:
        """Write the numbers."""
        for name, value in values.items():
            if name == "outliers" and value:
                text = ", ".join(f"{each['sample']} ({each['norm']:.3g})" for each in value)
                self._writer.add_text(self._prefix + name, text, step)
            elif isinstance(value, (int, float)):
                self._writer.add_scalar(self._prefix + name, value, step)
        self._writer.flush()


class Printed:
    """Prints one line for each monitored step.

    Args:
        console: The console; by default standard output, without colours if it is no terminal.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console

    def __call__(self, values: Values, step: int) -> None:
        """Print the totals."""
        console = self._console or Console(highlight=False)
        console.print(one_line(values, step), markup=False, soft_wrap=True)


def one_line(values: Values, step: int) -> str:
    """Format the totals of a step in one line.

    Example:
        >>> one_line({"samples": 8, "noise_scale": 12.34, "noise_scale_low": 5.0, "noise_scale_high": None}, 3)
        'step 3: 8 samples, noise scale 12.3 (5 to ∞)'
    """
    parts = [f"{values['samples']} samples"]
    ratios = [name for name in ("noise_scale", "critical_batch_size") if name in values]
    parts += [f"{name.replace('_', ' ')} {_with_interval(values, name)}" for name in ratios]
    titles = {
        "signal_to_noise": "signal to noise",
        "gradient_norm": "gradient norm",
        "sample_norm_median": "median of samples",
        "ggn_trace": "GGN trace",
        "sharpness": "sharpness",
        "update_ratio": "update ratio",
    }
    parts += [f"{title} {_shown(values[name])}" for name, title in titles.items() if name in values]
    found = values.get("outliers", [])
    if found:
        parts.append("outliers " + " ".join(str(each["sample"]) for each in found))
    return f"step {step}: {', '.join(parts)}"


def _with_interval(values: Values, name: str) -> str:
    low, high = values.get(f"{name}_low"), values.get(f"{name}_high")
    text = _shown(values[name])
    return text if low is None else f"{text} ({_shown(low)} to {'∞' if high is None else _shown(high)})"


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


def logs_of(log: Any) -> list[Log]:
    """Read the argument ``log`` of ``Monitor``.

    Raises:
        BadInput: For anything that cannot log.
    """
    if log is None:
        return []
    if isinstance(log, Sequence) and not isinstance(log, str):
        return [each for one in log for each in logs_of(one)]
    if log == "print":
        return [Printed()]
    if isinstance(log, (str, Path)):
        if Path(log).suffix != ".jsonl":
            raise BadInput(ASKED, f"log={str(log)!r}", "the name of a log file must end in .jsonl", CHOICES)
        return [JsonLines(log)]
    if hasattr(log, "add_scalar"):
        return [TensorBoard(log)]
    if isinstance(log, type) or not callable(log):
        raise BadInput(ASKED, f"log of type {type(log).__name__}", "packprop cannot log to it", CHOICES)
    return [log]
