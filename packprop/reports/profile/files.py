"""The files of a profile: where they can be written, how, and how a row is read back."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any

from packprop.errors import BadInput
from packprop.reports.profile.layers import Layer, Spectrum


def check_folder(folder: str | Path) -> None:
    """Refuse a folder that files cannot be written into; it need not exist yet, and nothing is written.

    Raises:
        BadInput: With the reason that the operating system gives.
    """
    existing = Path(folder)
    while not os.path.lexists(existing):
        existing = existing.parent
    why = ""
    if not existing.is_dir():
        why = f"{existing} is a file, not a folder"
    for name in ("profile.json", "profile.safetensors"):
        if (Path(folder) / name).is_dir():
            why = f"{name} in it is a folder"
    if not why:
        try:
            with tempfile.TemporaryFile(dir=existing):
                return
        except OSError as error:
            why = f"nothing can be written to {existing}: {error.strerror or error}"
    raise BadInput(
        f"A profile was to be saved in {str(folder)!r}.",
        "the output folder",
        why,
        "give a folder that can be written to, or that can be made",
    )


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that there is always either the old one or the new one, whole."""
    scratch = path.with_name(path.name + ".part")
    scratch.write_bytes(content)
    os.replace(scratch, path)


def json_ready(value: Any) -> Any:
    """The same nesting with ``None`` in place of infinite numbers and NaN, which JSON cannot express."""
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_ready(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def layer_from(saved: dict[str, Any]) -> Layer:
    """A row of the table, from its entry in the JSON file."""
    factors = {name: Spectrum(**spectrum) for name, spectrum in saved["factors"].items()}
    return Layer(**{**saved, "factors": factors})
