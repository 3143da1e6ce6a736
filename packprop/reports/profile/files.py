"""Writing a profile to files."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any

from packprop.errors import BadInput
from packprop.reports.profile.layers import Layer, Spectrum


def check_folder(folder: str | Path) -> None:
    """Raise unless files can be written into a folder, which need not exist yet; nothing is left.

    Raises:
        BadInput: With the reason of the operating system.
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
    """Write a file so that it is either the old one or the new one, whatever happens meanwhile."""
    scratch = path.with_name(path.name + ".part")
    scratch.write_bytes(content)
    os.replace(scratch, path)


def json_ready(value: Any) -> Any:
    """The same nesting without what JSON has no word for."""
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_ready(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def layer_from(saved: dict[str, Any]) -> Layer:
    """A row of the table from what was saved of it."""
    factors = {name: Spectrum(**spectrum) for name, spectrum in saved["factors"].items()}
    return Layer(**{**saved, "factors": factors})
