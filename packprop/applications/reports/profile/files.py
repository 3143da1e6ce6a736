"""The files of a profile: their folder, writing them, and reading them back."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from packprop.applications.dataset.digests import bytes_digest
from packprop.errors import BadInput
from packprop.store.files import written_whole

FORMAT = "profile of a network, format 2"
"""The name of the format, as a file states it."""

NAMES = ("profile.json", "profile.safetensors")
"""The files of a profile."""

PAGE = "profile.html"
"""The file of the page, in the same folder."""


def check_folder(folder: str | Path) -> None:
    """Refuse a folder that files cannot be written into. It need not exist yet, and this check leaves no file.

    Raises:
        BadInput: If the folder is refused; the error gives the operating system's reason.
    """
    existing = Path(folder)
    while not os.path.lexists(existing):
        existing = existing.parent
    why = ""
    if not existing.is_dir():
        why = f"{existing} is a file, not a folder"
    for name in (*NAMES, PAGE):
        if (Path(folder) / name).is_dir():
            why = f"{name} in it is a folder"
    if not why:
        try:
            with tempfile.TemporaryFile(dir=existing):
                return
        except OSError as error:
            why = f"packprop cannot write to {existing}: {error.strerror or error}"
    raise BadInput(
        f"A profile was to be saved in {str(folder)!r}.",
        "the output folder",
        why,
        "give a folder that you can write to, or a new one",
    )


def replace_files(contents: Mapping[Path, bytes]) -> None:
    """Write files, each at any time the old or the new one, complete; if the disk is full, all are old."""
    with contextlib.ExitStack() as stack:
        for path, content in contents.items():
            stack.enter_context(written_whole(path)).write_bytes(content)


def replace_profile(folder: Path, text: str, tensors: Mapping[str, Tensor]) -> tuple[Path, Path]:
    """Write the files of a profile; the second holds a digest of the first, to tell those of two profiles."""
    facts, values = folder / NAMES[0], folder / NAMES[1]
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    told = {NAMES[0]: bytes_digest(text.encode())}
    replace_files({facts: text.encode(), values: safetensors.torch.save(whole, told)})
    return facts, values


def json_ready(value: Any) -> Any:
    """Return the same nesting with ``None`` in place of infinite numbers and NaN, which JSON cannot express."""
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_ready(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_files(folder: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the files of a profile: the entries of the JSON file, and the tensors.

    Raises:
        BadInput: If files are missing, are no files of a profile, or have another format.
    """
    asked = f"A profile was to be read from {str(folder)!r}."
    paths = [Path(folder) / name for name in NAMES]
    again = "give a folder that `packprop profile` or `Profile.save` has written"
    if Path(folder).is_file():
        raise BadInput(asked, "the folder", "it is a file", f"{again}, not a file in it")
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise BadInput(asked, "the folder", f"it lacks {' and '.join(missing)}", again)
    try:
        text = paths[0].read_bytes()
        saved = json.loads(text)
        tensors = safetensors.torch.load_file(paths[1])
        with safetensors.safe_open(paths[1], "pt") as file:
            told = (file.metadata() or {}).get(NAMES[0])
    except (OSError, ValueError, SafetensorError) as error:
        why = f"it cannot be read: {str(error).splitlines()[0]}"
        raise BadInput(asked, "a file in the folder", why, "make the profile again") from error
    if not isinstance(saved, dict) or "layers" not in saved:
        raise BadInput(asked, paths[0].name, "it is not the file of a profile", again)
    if saved.get("format") != FORMAT:
        version = saved.get("settings", {}).get("packprop")
        by = "another version of packprop" if version is None else f"packprop {version}"
        why = f"{by} wrote it as {saved.get('format', 'an unnamed format')!r}; this version reads {FORMAT!r}"
        raise BadInput(asked, paths[0].name, why, "make the profile again, or read it with that version")
    if told not in (None, bytes_digest(text)):
        why = "they belong to two profiles, or one was changed: the second has the digest of another first"
        raise BadInput(asked, " and ".join(NAMES), why, "make the profile again")
    del saved["format"]
    return saved, tensors


def write_page(path: str | Path, text: str) -> Path:
    """Write a page to a file, over an older one; return its path.

    Raises:
        BadInput: If the file cannot be written.
    """
    try:
        replace_files({Path(path): text.encode()})
    except OSError as error:
        raise BadInput(
            f"A page was to be written to {str(path)!r}.",
            "the file",
            f"it cannot be written: {error.strerror or error}",
            "name a file in an existing folder that you can write to",
        ) from error
    return Path(path)
