"""A script run by gradscope sees what it would see under Python itself, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradscope.errors import TargetError
from gradscope.workload import Script, cut_own_frames, load_target

# What Python promises a main module, as far as two processes can be compared.
PROBE = '''"""The probe."""
import json, sys
seen = {name: repr(value) for name, value in globals().items() if name.startswith("__") and name != "__loader__"}
seen["__spec__"] = None if __spec__ is None else [__spec__.name, __spec__.origin]
seen["loader"] = type(__loader__).__name__
seen["argv"] = sys.argv
seen["first"] = sys.path[0]
seen["main"] = sys.modules["__main__"].__dict__ is globals()
import beside
seen["beside"] = beside.__file__
with open(sys.argv[1], "w") as out:
    json.dump(seen, out)
'''


@pytest.fixture(autouse=True)
def _same_interpreter_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves the interpreter changed, and forget the modules it imported."""
    before = sys.argv, sys.path, list(sys.path), sys.modules["__main__"], set(sys.modules)
    yield
    monkeypatch.undo()
    assert sys.argv is before[0]
    assert sys.path is before[1]
    assert sys.path == before[2]
    assert sys.modules["__main__"] is before[3]
    for name in sorted(set(sys.modules) - before[4], reverse=True):  # a folder's path asks for the package above it
        places = [getattr(sys.modules[name], "__file__", None), *getattr(sys.modules[name], "__path__", [])]
        if any(str(place).startswith(str(tmp_path)) for place in places):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a script and a package that has the same script in it."""
    monkeypatch.chdir(tmp_path)
    for place in (Path("sub"), Path("pkg")):
        place.mkdir()
        (place / "train.py").write_text(PROBE)
    Path("pkg/__init__.py").touch()
    Path("pkg/__main__.py").write_text(PROBE)
    for place in ("pkg/plain", "plain/deep/deeper"):  # folders without __init__.py
        Path(place).mkdir(parents=True)
        Path(place, "train.py").write_text(PROBE)
    Path("sub/beside.py").touch()
    Path("beside.py").touch()
    Path("link.py").symlink_to("sub/train.py")
    return tmp_path


def script(target: str, *args: str, module: bool = False) -> Script:
    loaded = load_target(target, args, module=module)
    assert isinstance(loaded, Script)
    return loaded


@pytest.mark.parametrize(
    ("target", "module"),
    [
        ("sub/train.py", False),
        ("./sub/../sub/train.py", False),
        ("link.py", False),
        ("pkg.train", True),
        ("pkg", True),
        ("pkg.plain.train", True),
        ("plain.deep.deeper.train", True),
    ],
)
def test_main_module_is_as_under_python(target: str, module: bool, folder: Path) -> None:
    command = [sys.executable, *(["-m"] if module else []), target, "out.json", "--flag"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""})
    expected: dict[str, Any] = json.loads(Path("out.json").read_text())
    Path("out.json").unlink()
    script(target, "out.json", "--flag", module=module).run()
    assert json.loads(Path("out.json").read_text()) == expected


def test_namespace_lives_during_and_after_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("train.py").write_text("model = 'first'\nwatch(model)\nmodel = 'second'\n")
    run = script("train.py")
    seen: list[str] = []
    # A hook of the profiler stands in the same place: it runs inside the script and looks the models' names up.
    monkeypatch.setattr("builtins.watch", lambda model: seen.append(run.namespace["model"]), raising=False)
    assert "model" not in run.namespace
    run.run()
    assert seen == ["first"]
    assert run.namespace["model"] == "second"


def test_second_run_starts_afresh(folder: Path) -> None:
    Path("train.py").write_text("count = globals().get('count', 0) + 1\n")
    run = script("train.py")
    names = run.namespace
    run.run()
    run.run()
    assert run.namespace is names
    assert names["count"] == 1


def test_everything_is_put_back_when_the_script_fails(folder: Path) -> None:
    Path("train.py").write_text(
        "import os, sys\nos.chdir('sub')\nsys.argv = ['x']\nsys.path = ['y']\nsys.modules['__main__'] = sys\n1 / 0\n"
    )
    with pytest.raises(ZeroDivisionError):
        script("train.py").run()
    assert Path.cwd() == folder  # the rest is checked by the fixture


def test_exit_goes_out(folder: Path) -> None:
    Path("train.py").write_text("import sys\nsys.exit(7)\n")
    with pytest.raises(SystemExit) as raised:
        script("train.py").run()
    assert raised.value.code == 7


def test_future_imports_of_gradscope_do_not_reach_the_script(folder: Path) -> None:
    Path("train.py").write_text("def f(x: undefined_name): ...\n")
    if sys.version_info < (3, 14):
        with pytest.raises(NameError):
            script("train.py").run()


def test_classes_of_the_script_pickle_while_it_runs(folder: Path) -> None:
    Path("train.py").write_text(
        "import pickle\nclass Net: ...\nassert type(pickle.loads(pickle.dumps(Net()))) is Net\ndone = True\n"
    )
    run = script("train.py")
    run.run()
    assert run.namespace["done"]
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(run.namespace["Net"]())


def test_spawned_processes_find_the_script(folder: Path) -> None:
    Path("train.py").write_text(
        "import multiprocessing\n"
        "def square(x):\n    return x * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        squares = pool.map(square, [1, 2, 3])\n"
        "        pool.close()\n"
        "        pool.join()\n"
    )
    run = script("train.py")
    run.run()
    assert run.namespace["squares"] == [1, 4, 9]


def test_parent_package_is_imported_by_the_run_not_before(folder: Path) -> None:
    Path("pkg/__init__.py").write_text("import sys\nseen = list(sys.argv)\n")
    Path("pkg/train.py").write_text("import pkg\nfrom . import seen\n")
    run = script("pkg.train", "a", module=True)
    assert "pkg" not in sys.modules
    run.run()
    assert run.namespace["seen"] == ["-m", "a"]


def test_script_that_has_gone(folder: Path) -> None:
    run = script("sub/train.py")
    Path("sub/train.py").unlink()
    with pytest.raises(TargetError, match=r"^cannot read .*train\.py: No such file or directory\."):
        run.run()


# --------------------------------------------------------------------------------------------------------------------
# Tracebacks
# --------------------------------------------------------------------------------------------------------------------


def frames_of(error: BaseException) -> list[tuple[str, str]]:
    return [(Path(frame.filename).name, frame.name) for frame in traceback.extract_tb(error.__traceback__)]


def test_only_the_users_frames_are_left(folder: Path) -> None:
    Path("helper.py").write_text("def fail():\n    raise ValueError('no')\n")
    Path("train.py").write_text("import helper\ndef main():\n    helper.fail()\nmain()\n")
    with pytest.raises(ValueError, match="no") as raised:
        script("train.py").run()
    frames = frames_of(cut_own_frames(raised.value))
    assert frames[-3:] == [("train.py", "<module>"), ("train.py", "main"), ("helper.py", "fail")]
    assert not [name for name, _ in frames if name == "script.py"]


def test_causes_and_groups_are_cut_too(folder: Path) -> None:
    inner = Path("inner.py")
    inner.write_text("1 / 0\n")
    try:
        script("inner.py").run()
    except ZeroDivisionError as error:
        wrapped = RuntimeError("wrapped")
        wrapped.__cause__ = ExceptionGroup("several", [error])
        cut_own_frames(wrapped)
        assert frames_of(error)[-1] == ("inner.py", "<module>")
        assert not [name for name, _ in frames_of(error) if name == "script.py"]


def test_an_error_of_our_own_keeps_its_frames(folder: Path) -> None:
    run = script("sub/train.py")
    Path("sub/train.py").unlink()
    with pytest.raises(TargetError) as raised:
        run.run()
    assert "source.py" in [name for name, _ in frames_of(cut_own_frames(raised.value))]


def test_an_error_that_refers_to_itself_ends(folder: Path) -> None:
    error = ValueError("loop")
    error.__context__ = KeyError("other")
    error.__context__.__context__ = error
    assert cut_own_frames(error) is error


def test_import_machinery_is_cut(folder: Path) -> None:
    Path("model.py").write_text("import missing_module\ndef workload(): ...\n")
    with pytest.raises(ModuleNotFoundError) as raised:
        load_target("model:workload")
    frames = frames_of(cut_own_frames(raised.value))
    assert [frame for frame in frames if frame[0] != Path(__file__).name] == [("model.py", "<module>")]
