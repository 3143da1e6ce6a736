"""``python -m benchmarks.install_size``: what pip fetches for packprop, with the CPU build of PyTorch.

Written to ``results/install_size.json``, in bytes, for the library alone and with what its page needs. PyTorch
is the build that the constraints and the index give; with another one most of the size is another.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import ROOT
from benchmarks.run import environment, write_results

ASKED = {"library": ".", "library, examples and page": ".[examples,report]"}


def fetched(what: str) -> dict[str, int]:
    """Each file that pip fetches for it, and its size in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        fetch = [sys.executable, "-m", "pip", "download", "-q", "-c", "constraints.txt", "-d", folder, what]
        subprocess.run(fetch, check=True, cwd=ROOT)
        sizes = {path.name: path.stat().st_size for path in Path(folder).iterdir()}
    return {name: sizes[name] for name in sorted(sizes) if not name.startswith("packprop-")}


def main() -> None:
    """Fetch, add up, write."""
    found = {}
    for name, what in ASKED.items():
        files = fetched(what)
        (torch,) = (size for file, size in files.items() if file.startswith("torch-"))
        found[name] = {"asked": what, "bytes": sum(files.values()), "torch": torch, "files": files}
        print(f"{name}: {sum(files.values()) / 1e6:.0f} MB, of which PyTorch is {torch / 1e6:.0f} MB")
    write_results("install_size", environment(1, 1, 1), sizes=found)


if __name__ == "__main__":
    main()
