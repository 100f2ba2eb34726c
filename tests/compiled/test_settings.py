"""Inductor's settings are gradscope's while it compiles, and the program's at any other time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Event, Thread
from typing import Any

import pytest
import torch

from gradscope.compat import GraphWatch, probe_graphs, watching_graphs
from gradscope.compat.inductor.settings import SETTINGS, Settings, _owner, _placed
from gradscope.compat.inductor.watch import _rename, _running
from gradscope.tables import GraphNote

# Loading Inductor warns of torch's own use of TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")

OURS = [value for _, _, value in SETTINGS]


@pytest.fixture
def settings() -> Settings:
    probe_graphs()
    return Settings()


def values() -> list[Any]:
    return [getattr(_owner(module, name), name.rpartition(".")[2]) for module, name, _ in SETTINGS]


def test_they_are_set_while_something_is_compiled_and_as_before_behind_it(settings: Settings) -> None:
    before, seen = values(), []

    def compile_something(inner: bool) -> None:
        seen.append((values(), settings.hold()))
        if inner:
            settings._around(compile_something)(False)
            seen.append((values(), settings.hold()))
        raise KeyError

    with pytest.raises(KeyError):
        settings._around(compile_something)(False)
    assert values() == before != OURS and not settings.hold()
    with pytest.raises(KeyError):
        settings._around(compile_something)(True)
    assert values() == before and seen == [(OURS, True)] * len(seen)


def test_what_a_pass_of_the_programs_sets_meanwhile_stays(settings: Settings) -> None:
    import torch._inductor.config as config

    level = config.trace.provenance_tracking_level
    settings._around(lambda: setattr(config.trace, "provenance_tracking_level", 2))()
    found = config.trace.provenance_tracking_level
    config.trace.provenance_tracking_level = level
    assert found == 2 and values() != OURS


@contextmanager
def patched() -> Iterator[None]:
    """What a program asks for that is not what it finds."""
    import torch._functorch.config as functorch
    import torch._inductor.config as config

    with (
        config.patch({"fx_graph_cache": False, "cpp.enable_kernel_profile": True}),
        functorch.patch(enable_autograd_cache=False),
    ):
        yield


def test_what_the_program_sets_meanwhile_stays() -> None:
    """Also where it is what gradscope sets, or put back when the measurement is over."""
    import torch._inductor.config as config
    from torch._inductor import compile_fx

    failed: list[Exception] = []
    before = values()
    program = patched()
    with watching_graphs(GraphWatch(), failed.append):
        assert values() == before
        program.__enter__()
        asked = values()
        with pytest.raises(TypeError):
            compile_fx._compile_fx_inner()
        assert values() == asked
        config.fx_graph_cache = False
    assert values() == asked
    program.__exit__(None, None, None)
    assert values() == before and not failed


def test_a_graph_that_is_to_be_written_to_a_file_is_compiled_as_it_is_alone(settings: Settings) -> None:
    import torch._functorch.config as functorch
    from torch._inductor.virtualized import V

    before = values()
    with functorch.patch(bundled_autograd_cache=True):
        assert settings._around(values)() == before
    with V.set_aot_compilation(True):
        assert settings._around(values)() == before


@pytest.mark.parametrize("shared", [True, False])
def test_threads_that_compile_at_the_same_time(settings: Settings, shared: bool) -> None:
    """With torch 2.11 they share the settings: the last of them puts these back."""
    if not shared and settings._shared:
        pytest.skip("threads share the settings with this torch")
    settings._shared = shared
    before, there, over = values(), Event(), Event()
    seen: list[Any] = []

    def compile_something() -> None:
        there.set()
        over.wait(60)
        seen.append(settings.hold())

    def other() -> None:
        settings._around(compile_something)()
        seen.append(values())

    thread = Thread(target=other)
    with nullcontext() if shared else settings._set(settings._values):
        thread.start()
        assert there.wait(60)
        settings._around(lambda: None)()
        over.set()
        thread.join()
    assert seen[-1] == before and values() == before
    assert seen[0]


def test_what_torch_takes_from_its_caches_to_write_it_is_compiled_as_it_is_alone(settings: Settings) -> None:
    scope = {"__name__": "torch._inductor.standalone_compile", "compile_something": settings._around(values)}
    exec("def standalone_compile():\n    return compile_something()", scope)
    before: list[Any] = values()
    assert scope["standalone_compile"]() == before  # type: ignore[operator]


def test_graphs_are_noted_where_the_environment_has_caches_used_in_any_case(settings: Settings) -> None:
    with settings._set(settings._values):
        config = _owner("torch._inductor.config", "fx_graph_cache")
        config.fx_graph_cache = True
        assert settings.hold()
        config.trace.provenance_tracking_level = 0
        assert not settings.hold()


def test_kernels_have_code_of_their_own_for_rows_where_cpp_calls_them_alone(settings: Settings) -> None:
    """Python may write a row around any other: their code is what the program's cache has."""
    rows = settings._around(lambda **_: settings.kernels_write_rows())
    assert not rows() and not rows(cpp_wrapper=False) and rows(cpp_wrapper=True)
    config = _owner("torch._inductor.config", "cpp_wrapper")
    with config.patch(cpp_wrapper=True):
        assert rows()
    with config.patch({"cpp.enable_kernel_profile": True}):  # the program's own
        assert rows()


class _Graph:
    """A CompiledFxGraph that runs nothing."""

    _fx_graph_cache_key = "key"  # in the name of the row that it writes


@pytest.mark.parametrize("known", [True, False])
def test_graphs_that_nobody_told_of_count_where_a_profiler_runs(known: bool) -> None:
    """What runs beside the measured steps alone needs no note."""
    watch, graph, named = GraphWatch(), _Graph(), dict[int, Any]()
    run = _running(lambda *_: None, watch, {id(graph): 0} if known else {}, named, pytest.fail)
    run(graph, [])
    assert watch.has_run and not watch.unknown_has_run and watch.first == ({0: ()} if known else {})
    if known:
        watch.graphs.append(GraphNote((), {}))
    with torch.autograd.profiler.profile():
        run(graph, [])
    assert watch.unknown_has_run is not known and len(watch.runs) == known
    assert (graph._fx_graph_cache_key == "key") is not known
    _rename(named)
    assert graph._fx_graph_cache_key == "key"


def test_parameters_of_a_graphs_first_run_are_those_that_it_was_compiled_for() -> None:
    watch = GraphWatch()
    one, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    assert not watch.name(7, [torch.ones(2), one, 3], profiled=False)
    watch.name(7, [torch.ones(2), other, 3], profiled=False)
    assert watch.first == {7: (0,)}


@pytest.mark.parametrize(
    ("module", "name"),
    [("torch._functorch.config", "bundled_autograd_cache"), ("torch._inductor.config", "cpp_wrapper")],
)
def test_what_another_torch_does_not_have_is_not_asked(
    settings: Settings, module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles for the program: an error there would end training."""

    class Without:
        def __getattr__(self, asked: str) -> Any:
            if asked == name:
                raise AttributeError(asked)
            return getattr(before, asked)

    before = sys.modules[module]
    if name == "cpp_wrapper":
        monkeypatch.setattr(settings, "_inductor", Without())
    monkeypatch.setitem(sys.modules, module, Without())  # type: ignore[arg-type]
    assert settings._around(lambda: 5)() == 5


def test_a_setting_that_another_torch_does_not_have_is_seen_before_anything_is_compiled() -> None:
    with pytest.raises(AttributeError):
        _placed(("torch._inductor.config", "trace.no_such_setting", True))
