"""The layout's rules: who may import whom, and what loads when."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# Each package may import what stands to its right; nothing else of gradscope.
_BASE = {"errors", "interrupts", "markers", "ops", "units", "versions", "safe_text", "inputs", "tables"}
_ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "interrupts": set(),
    "markers": set(),
    "ops": set(),
    "units": {"errors", "safe_text"},
    "versions": set(),
    "safe_text": set(),
    "inputs": {"units"},
    "tables": {"errors", "units", "safe_text"},
    "process": set(),
    "trampoline": set(),
    "tensor_refs": {"trampoline"},
    "compat": {*_BASE, "process", "tensor_refs", "trampoline"},
    "devices": set(),
    "tree": set(),
    "workload": {*_BASE, "compat", "tree"},
    "capture": {*_BASE, "compat", "devices", "process", "tensor_refs", "trampoline", "tree", "workload"},
    "trace": {*_BASE, "compat"},
    "attribute": _BASE,
    "diagnose": {*_BASE, "recording"},
    "limits": {*_BASE, "compat", "devices"},
    "document": {"units", "safe_text"},
    "report": {*_BASE, "document"},
    "compare": {*_BASE, "config", "document", "report"},
    "recipes": {*_BASE, "kernels"},
    "kernels": {*_BASE, "compat"},
    "readings": {*_BASE, "capture", "trace", "attribute"},
    "graphs": {*_BASE, "capture", "tree"},
    "about": {*_BASE, "tree", "capture", "attribute", "readings", "graphs"},
    "evidence": {*_BASE, "capture", "recording", "diagnose", "patching"},
    "pipeline": {
        *_BASE,
        "compat",
        "process",
        "workload",
        "capture",
        "trace",
        "attribute",
        "readings",
        "graphs",
        "about",
        "evidence",
        "limits",
        "diagnose",
        "recording",
        "patching",
        "report",
    },
    "api": {
        *_BASE,
        "compat",
        "workload",
        "capture",
        "recording",
        "trace",
        "diagnose",
        "patching",
        "report",
        "pipeline",
    },
    "ranks": {*_BASE, "document", "report"},
    "chrome": {*_BASE, "tree", "workload", "trace", "attribute", "diagnose", "report"},
    "integrations": {*_BASE, "api", "capture", "report", "compare", "document", "pipeline", "workload"},
    "fitting": {
        *_BASE,
        "compat",
        "tree",
        "workload",
        "capture",
        "trace",
        "attribute",
        "document",
        "report",
        "readings",
    },
    "recording": {*_BASE, "process", "tensor_refs", "tree", "capture"},
    "patching": {
        *_BASE,
        "compat",
        "tree",
        "workload",
        "capture",
        "recording",
        "trace",
        "recipes",
        "kernels",
    },
    "fixing": {
        *_BASE,
        "compat",
        "tree",
        "workload",
        "capture",
        "trace",
        "attribute",
        "document",
        "report",
        "compare",
        "pipeline",
        "recipes",
        "patching",
    },
    "config": {"errors", "inputs", "safe_text"},
    "cli": {
        *_BASE,
        "config",
        "process",
        "devices",
        "fixing",
        "patching",
        "compat",
        "limits",
        "workload",
        "pipeline",
        "chrome",
        "ranks",
        "fitting",
        "diagnose",
        "document",
        "report",
        "compare",
        "recipes",
    },
}


def _sources() -> list[tuple[str, Path]]:
    found = []
    for path in sorted((REPOSITORY / "gradscope").rglob("*.py")):
        parts = path.relative_to(REPOSITORY / "gradscope").with_suffix("").parts
        if parts not in {("__init__",), ("__main__",)}:
            found.append((parts[0], path))
    for package in ("recipes", "kernels"):
        found += [(package, path) for path in sorted((REPOSITORY / package).rglob("*.py"))]
    return found


def _imported(path: Path) -> set[str]:
    """Packages of gradscope that the file imports anywhere, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: relative import"
            if node.module == "gradscope":
                found |= {alias.name for alias in node.names}
            elif node.module.startswith("gradscope."):
                found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("gradscope.")}
    return found


@pytest.mark.parametrize(("package", "path"), _sources(), ids=lambda value: str(value).removeprefix(str(REPOSITORY)))
def test_imports_go_down_the_layout(package: str, path: Path) -> None:
    wrong = _imported(path) - _ALLOWED[package] - {package, "__version__"}
    assert not wrong, f"{package} may not import {sorted(wrong)}"


# What the packages of patching may import of it, beside themselves.
_INSIDE_PATCHING = {"match": set(), "edit": {"match"}, "prove": {"match", "edit", "plan", "sites", "swap"}}


@pytest.mark.parametrize("package", _INSIDE_PATCHING)
def test_imports_go_down_inside_patching(package: str) -> None:
    for path in sorted((REPOSITORY / "gradscope" / "patching" / package).rglob("*.py")):
        below = re.findall(r"^ *from gradscope\.patching\.(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        wrong = set(below) - _INSIDE_PATCHING[package] - {package}
        assert not wrong, f"{path} may not import {sorted(wrong)} of patching"


def test_no_modules_import_each_other() -> None:
    """At the top of a file; what a function imports when it runs closes no circle while they load."""
    modules = {_module_name(path): path for _, path in _sources()}
    graph = {name: _top_imports(path, set(modules)) for name, path in modules.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(modules)  # CycleError names the circle


def _module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    below = parts if parts[0] == "gradscope" else ("gradscope", *parts)
    return ".".join(below[:-1] if below[-1] == "__init__" else below)


def _top_imports(path: Path, modules: set[str]) -> set[str]:
    """Those of ``modules`` that the file imports when it is loaded: the module itself, or the one that a name is of."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {each if each in modules else node.module for each in whole}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules


def test_private_names_of_torch_come_from_one_face() -> None:
    for package, path in _sources():
        below = re.findall(r"gradscope\.compat\.(\w+)", path.read_text(encoding="utf-8"))
        assert package == "compat" or not below, f"{path} imports from gradscope.compat.{below[0]}"


def test_only_the_command_line_prints() -> None:
    for package, path in _sources():
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        prints = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
        assert package == "cli" or not prints, f"{path} prints"


_HEAVY = {"torch", "numpy", "pandas", "plotly", "triton"}


def _loaded_by(statement: str, folder: Path) -> set[str]:
    code = f"import sys; {statement}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder)
    return set(run.stdout.split())


@pytest.mark.parametrize("statement", ["import gradscope", "import gradscope.cli", "dir(__import__('gradscope'))"])
def test_nothing_heavy_is_loaded_early(statement: str, tmp_path: Path) -> None:
    assert not _loaded_by(statement, tmp_path) & _HEAVY


def test_measuring_loads_neither_plotly_nor_triton(tmp_path: Path) -> None:
    assert not _loaded_by("import gradscope.api", tmp_path) & {"plotly", "triton"}


def test_measuring_loads_patterns_and_recipes_when_a_step_was_recorded(tmp_path: Path) -> None:
    """They are a third of gradscope's code, and nothing is on the screen yet when the pipeline is loaded."""
    code = "import sys; import gradscope.api; print(*(n for n in sys.modules if n.startswith('gradscope.')))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    loaded = {name.split(".")[1] for name in run.stdout.split()}
    assert "capture" in loaded and not loaded & {"patching", "recipes", "kernels"}


def test_recipes_and_kernels_import_from_any_folder(tmp_path: Path) -> None:
    _loaded_by("import gradscope.recipes, gradscope.kernels", tmp_path)


def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    """What keeps ``gradscope --help`` under 0.4 s; the time itself is in benchmarks/responsiveness.py."""
    code = "import sys\nfrom gradscope.cli import main\ntry: main(['--help'])\nexcept SystemExit: print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "profile" in run.stdout
    loaded = {name.partition(".")[0] for name in run.stdout.splitlines()[-1].split()}
    assert "typer" in loaded and not loaded & _HEAVY


def test_nothing_heavy_is_loaded_before_the_first_line(tmp_path: Path) -> None:
    """The line that torch is being loaded is all that a user sees for seconds: nothing slow comes before it."""
    code = (
        "import sys\nfrom importlib import import_module\nfrom gradscope.cli import main\n"
        "command = import_module('gradscope.cli.profile')\n"
        "def said(target, *, quiet): print(*sys.modules); raise SystemExit(0)\n"
        "command.say_loading = said\nmain(['profile', 'train.py'])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    loaded = {name.partition(".")[0] for name in run.stdout.split()}
    assert "typer" in loaded and not loaded & _HEAVY
