"""What a Triton kernel takes of a GPU's multiprocessor, from compiling it: no GPU is needed.

Imported in a process without ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ALIGNED = ":16"  # behind a type: the argument is a multiple of 16, as triton finds out at a launch
_ATTRIBUTES = [["tt.divisibility", 16]]
_WARP = 32


class Fixed(NamedTuple):
    """An argument that the kernel is compiled for."""

    value: Any


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one compiled kernel."""

    registers: int  # a thread
    spilled_bytes: int  # written and read a thread, in the program's text
    shared_bytes: int  # a program


def resources(kernel: Any, given: Mapping[str, Any], warps: int, stages: int, target: int) -> Resources:
    """Compile ``kernel`` and ask ptxas.

    Args:
        given: argument -> its type as triton spells it ("*bf16", "i32", "i32:16"), a tuple of types, or ``Fixed``.
            Pointers are taken to be aligned. What the kernel does not have is passed over.
        target: compute capability, times ten.
    """
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    signature = {
        name: _typed(given[name], (index,), constants, attributes) for index, name in enumerate(kernel.arg_names)
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", target, _WARP), options=options)
    said = _ptxas(compiled.asm["ptx"])
    found = re.search(r"Used (\d+) registers", said)
    assert found is not None, said
    return Resources(
        registers=int(found[1]),
        spilled_bytes=sum(int(count) for count in re.findall(r"(\d+) bytes spill", said)),
        shared_bytes=int(compiled.metadata.shared),
    )


def _typed(value: Any, path: tuple[int, ...], constants: dict[Any, Any], attributes: dict[Any, Any]) -> Any:
    if isinstance(value, Fixed):
        constants[path] = value.value
        return "constexpr"
    if isinstance(value, tuple):
        parts = (_typed(each, (*path, index), constants, attributes) for index, each in enumerate(value))
        return type(value)(*parts)
    if value.startswith("*") or value.endswith(ALIGNED):
        attributes[path] = _ATTRIBUTES
    return value.removesuffix(ALIGNED)


def _ptxas(text: str) -> str:
    """What ptxas says of a program in PTX; it comes with triton."""
    target = re.search(r"^\.target (\w+)", text, re.MULTILINE)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "kernel.ptx")
        program.write_text(text)
        command = [triton.knobs.nvidia.ptxas.path, "-v", f"-arch={target[1]}", program, "-o", program.with_suffix(".o")]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"ptxas failed: {run.stderr.strip()[:300]}")
    return run.stderr
