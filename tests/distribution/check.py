"""Install a wheel into an environment of its own, and try it there: ``make dist``.

The environment sees the libraries of the one that runs this, so nothing is fetched, but not its packprop: what
is imported is what the wheel holds. The source distribution was built before the wheel, and the wheel from it.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {"__pycache__"}


def files_of_the_package(root: Path) -> set[str]:
    """Every file that users get: ``packprop/...``."""
    found = (path for path in (root / "packprop").rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix() for path in found if not LEFT_OUT & set(path.parts)}


def missing(expected: Iterable[str], names: Iterable[str]) -> list[str]:
    """Files that should be there and are not.

    >>> missing({"packprop/py.typed"}, ["packprop-1/packprop/__init__.py"])
    ['packprop/py.typed']
    >>> missing({"packprop/py.typed"}, ["packprop-1/packprop/py.typed"])
    []
    """
    held = set(names)
    inner = {name.partition("/")[2] for name in held}
    return sorted(set(expected) - held - inner)


def run(*command: str | Path, folder: Path) -> str:
    """What a command prints; an error if it fails."""
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def check(folder: Path) -> None:
    """Look into both distributions, and run the programs in ``smoke.py`` on the installed wheel."""
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    expected = files_of_the_package(ROOT)
    with zipfile.ZipFile(wheel) as opened:
        in_wheel = opened.namelist()
    with tarfile.open(source) as opened_source:
        in_source = opened_source.getnames()
    for name, lost in ((wheel.name, missing(expected, in_wheel)), (source.name, missing(expected, in_source))):
        if lost:
            sys.exit(f"{name} is without {', '.join(lost)}; data files are named in pyproject.toml")
    if strange := [name for name in in_wheel if not name.startswith(("packprop/", "packprop-"))]:
        sys.exit(f"{wheel.name} holds what is no part of packprop: {', '.join(strange)}")
    with tempfile.TemporaryDirectory() as held:
        environment = Path(held) / "environment"
        run(sys.executable, "-m", "venv", environment, folder=ROOT)
        python = environment / "bin" / "python"
        site = Path(
            run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=ROOT).strip()
        )
        # A line of a .pth file adds a path, but the .pth files there are not read: no editable install.
        (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel.resolve(), folder=ROOT)
        smoke = Path(__file__).with_name("smoke.py").read_text(encoding="utf-8")
        print(run(python, "-c", smoke, site, folder=Path(held)), end="")
        print(run(environment / "bin" / "packprop", "profile", "--help", folder=Path(held)).splitlines()[0])
    print(f"{wheel.name}: {len(in_wheel)} files, {wheel.stat().st_size / 1000:.0f} kB; {source.name}")


if __name__ == "__main__":
    check(Path(sys.argv[1]))
