"""Make an environment of one version of torch and this Python under build/, and print its path.

    python3.13 tests/versions/environment.py 2.15.0

It holds what constraints.txt pins, but for the lines that ``torch-<version>.txt`` beside this file replaces. A build of
torch for CUDA gets the libraries that ``import torch`` asks for and no others: enough for the CPU, a third of the disk.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
_LINTERS = {"ruff", "mypy", "pandas-stubs"}  # `make lint` runs once, in .venv


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"usage: {Path(sys.argv[0]).name} VERSION\nVERSION is one of {', '.join(known())}")
    version = sys.argv[1]
    if version not in known():
        sys.exit(
            f"no pins for torch {version}: there are some for {', '.join(known())}\n"
            f"For another version write {HERE.relative_to(REPOSITORY)}/torch-{version}.txt with its torch and triton."
        )
    print(environment(version))


def known() -> list[str]:
    """The versions of torch that there are pins for, in order."""
    found = [path.stem.removeprefix("torch-") for path in HERE.glob("torch-*.txt")]
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


def environment(version: str) -> Path:
    """The environment of a version, made where it is missing or older than its pins."""
    folder = REPOSITORY / "build" / f"torch-{version}-python{sys.version_info.major}.{sys.version_info.minor}"
    wanted = "\n".join(pins(version))
    ready = folder / "pins.txt"
    if ready.exists() and ready.read_text(encoding="utf-8") == wanted:
        return folder
    venv.create(folder, with_pip=True, clear=not ready.exists())
    asked = folder / "asked.txt"
    asked.write_text(wanted, encoding="utf-8")
    _install(folder, "--requirement", str(asked))
    if next(folder.glob("lib/*/site-packages/torch/lib/libtorch_cuda.so"), None):
        _share_cuda(folder)
    _install(folder, "--no-build-isolation", "--editable", str(REPOSITORY))
    asked.rename(ready)
    return folder


def _share_cuda(folder: Path) -> None:
    """Link to the libraries of CUDA, which lie once under build/: 2.8 GB, the same for every environment."""
    shared, wanted = REPOSITORY / "build" / "cuda", HERE / "cuda.txt"
    ready = shared / "pins.txt"
    if not ready.exists() or ready.read_bytes() != wanted.read_bytes():
        shutil.rmtree(shared, ignore_errors=True)
        _install(folder, "--target", str(shared), "--requirement", str(wanted))
        shutil.copyfile(wanted, ready)
    packages = next(folder.glob("lib/*/site-packages"))
    (packages / "nvidia").unlink(missing_ok=True)
    (packages / "nvidia").symlink_to(shared / "nvidia")


def pins(version: str) -> list[str]:
    """Each package of constraints.txt with the version for this torch."""
    chosen = _read(REPOSITORY / "constraints.txt") | _read(HERE / f"torch-{version}.txt")
    return [f"{name}=={number}" for name, number in sorted(chosen.items()) if name not in _LINTERS]


def _read(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(re.fullmatch(r"(\S+)==(\S+)", line).groups() for line in lines if line and not line.startswith("#"))


def _install(folder: Path, *what: str) -> None:
    """Install without dependencies: the pins are the whole list, and torch's own would add gigabytes of CUDA."""
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "--no-deps", *what], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    main()
