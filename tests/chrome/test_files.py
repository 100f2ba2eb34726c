"""Files that are no trace of a training step, or a broken one: one to three lines, whatever they hold."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from gradscope.chrome.run import read_trace, steps_of
from gradscope.errors import TraceFileError, UsageError
from tests.chrome.made import MAIN, Made, two_layers

INFERENCE = Made()
INFERENCE.op("aten::mm", 0, 10)
COMPILED = Made()
COMPILED.annotation("Torch-Compiled Region: !0/1/0", 0, 10)
DEVICE_ONLY = Made()
DEVICE_ONLY.kernel(0, 10, 3)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"# a text", "is not a whole trace: Expecting value (line 1, column 1)"),
        (b'{"traceEvents": [{"ph": "X"', "is not a whole trace"),
        (b'{"schema_version": 1, "layers": []}', "is not a trace of torch.profiler"),
        (b"[1, 2, 3]", "is not a trace of torch.profiler"),
        (b'"traceEvents"', "is not a trace of torch.profiler"),
        (gzip.compress(b'{"traceEvents": []}')[:-9], "is cut off or damaged"),
        (b"\x1f\x8b\x08\x00 no gzip", "is cut off or damaged"),
        (json.dumps({"traceEvents": INFERENCE.events}).encode(), "holds no backward pass"),
        (json.dumps({"traceEvents": INFERENCE.events}).encode(), "which is so of inference"),
        (json.dumps({"traceEvents": COMPILED.events}).encode(), "compiled autograd ran the backward pass as one graph"),
        (json.dumps({"traceEvents": DEVICE_ONLY.events}).encode(), "it has the device's side alone"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # what gzip writes has the time in it
)
def test_what_is_no_trace_says_so_and_what_to_do(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TraceFileError) as raised:
        read_trace(path)
    message = str(raised.value)
    assert words in message and message.count("\n") == 1
    assert str(path) in message or "trace.json" in message


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="no such file"):
        read_trace(tmp_path / "none.json")
    with pytest.raises(TraceFileError, match="it is a folder"):
        read_trace(tmp_path)


def test_a_file_that_unpacks_to_more_than_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradscope.chrome.reading._MOST_UNPACKED", 1000)
    path = two_layers().save(tmp_path / "trace.json.gz")
    with pytest.raises(TraceFileError, match="unpacked it has more than"):
        read_trace(path)


def test_steps_that_are_not_there(tmp_path: Path) -> None:
    path = two_layers().save(tmp_path / "trace.json")
    with pytest.raises(TraceFileError, match=r"has steps 4 to 5: --steps 7-9 leaves none"):
        read_trace(path, steps=(7, 9))


def _with_validation() -> Made:
    """Four steps, 4 to 7, of which 5 runs forward alone."""
    made = two_layers(4)
    made.events = [event for event in made.events if not 1300 <= event["ts"] < 2000]
    return made


@pytest.mark.parametrize(("steps", "wanted"), [(None, 3), ((4, 7), 3), ((5, 6), 1)])
def test_a_step_without_a_backward_pass_does_not_count(
    tmp_path: Path, steps: tuple[int, int] | None, wanted: int
) -> None:
    """Also where it is asked for."""
    data = read_trace(_with_validation().save(tmp_path / "trace.json"), steps=steps).data
    assert data.workload.steps == wanted
    assert data.step.forward_ns == 220_000 and data.step.backward_ns == 400_000


def test_steps_that_all_have_no_backward_pass_are_refused(tmp_path: Path) -> None:
    path = _with_validation().save(tmp_path / "trace.json")
    with pytest.raises(TraceFileError, match="no backward pass in --steps 5-5: a step without one does not count"):
        read_trace(path, steps=(5, 5))
    made = two_layers(1)
    made.events[0]["dur"] = 100.0  # the step's mark ends before the pass
    with pytest.raises(TraceFileError, match="has step 4 alone, and no backward pass in it"):
        read_trace(made.save(tmp_path / "early.json"))


@pytest.mark.parametrize("text", ["", "a", "3-", "-3", "3-2", "1.5", "3-4-5", "9" * 40, "\u0664", "3-\u0664"])
def test_steps_are_a_number_or_two(text: str) -> None:
    with pytest.raises(UsageError, match="--steps"):
        steps_of(text)


def test_steps_of_a_text() -> None:
    assert (steps_of("3"), steps_of(" 2-10 ")) == ((3, 3), (2, 10))


def test_events_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    made = two_layers()
    for broken in ({"ts": "soon"}, {"dur": None}, {"args": {"Sequence number": "x"}}):
        made.events.append({**next(event for event in made.events if event.get("cat") == "cpu_op"), **broken})
    notes = read_trace(made.save(tmp_path / "trace.json")).data.notes
    assert any(note.startswith("3 of ") and "events could not be read" in note for note in notes)
    assert not any(
        "could not be read" in note for note in read_trace(two_layers().save(tmp_path / "a.json")).data.notes
    )


_ODD: tuple[Any, ...] = (None, -1, 1e300, "x", "", [], {}, True, 10**30, float("nan"), -5.5, [[1], "a", None])


def _mutated(made: Made, chosen: random.Random) -> Any:
    """The trace with a few things of it replaced, left out or doubled."""
    whole = json.loads(json.dumps({**made.about, "traceEvents": made.events}))
    events = whole["traceEvents"]
    for _ in range(chosen.randint(1, 6)):
        event = chosen.choice(events)
        key = chosen.choice([*event, "args", "ts"])
        act = chosen.randrange(5)
        if act == 0:
            event.pop(key, None)
        elif act == 1:
            event[key] = chosen.choice(_ODD)
        elif act == 2 and isinstance(event.get("args"), dict) and event["args"]:
            event["args"][chosen.choice(list(event["args"]))] = chosen.choice(_ODD)
        elif act == 3:
            events.append({**event, "tid": chosen.choice((event.get("tid"), MAIN, 99))})
        else:
            event["ts"] = chosen.uniform(-1e4, 1e4)
    if chosen.random() < 0.2:
        whole[chosen.choice(list(whole))] = chosen.choice(_ODD)
    return whole


@pytest.mark.parametrize("seed", range(40))
def test_a_mutated_trace_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    """Ten of each seed: whatever they hold, the sums hold (RunData checks them) and nothing else is raised."""
    chosen = random.Random(seed)
    for number in range(10):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(_mutated(two_layers(), chosen)), encoding="utf-8")
        try:
            report = read_trace(path)
        except TraceFileError:
            continue
        report.to_markdown(full=True)
        report.save(tmp_path / f"{number}.run.json")


def test_several_processes_in_a_file_are_refused(tmp_path: Path) -> None:
    """They number steps, launches and threads alike."""
    made = two_layers()
    both = [*made.events, *({**event, "pid": 4_711} for event in made.events)]
    path = tmp_path / "both.json"
    path.write_text(json.dumps({"traceEvents": both}), encoding="utf-8")
    with pytest.raises(TraceFileError, match="2 processes that went backward"):
        read_trace(path)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("autograd::engine::evaluate_function: MulBackward0", {"Sequence number": 5, "Fwd thread id": 2**31}),
        ("ProfilerStep#\u00b2", {}),
        ("ProfilerStep#" + "9" * 5_000, {}),
    ],
    ids=["a thread's number", "no digit", "many digits"],
)
def test_numbers_that_are_none_are_left_out(name: str, arguments: dict[str, int], tmp_path: Path) -> None:
    made = two_layers()
    made.add("user_annotation" if "Step" in name else "cpu_op", name, 10, 20, MAIN, **arguments)
    assert read_trace(made.save(tmp_path / "odd.json")).data.workload.steps == 2


@pytest.mark.parametrize("number", ["9999", "x", "9" * 23, "0", ""])
@pytest.mark.parametrize("kind", ["call", "step", "backward", "hook", "parameter", "recompute", "line", "own"])
def test_a_row_that_is_named_as_a_marker_is_none(kind: str, number: str, tmp_path: Path) -> None:
    """The user's own record_function, or a trace of a job that gradscope profiled: the report says the same."""
    found = []
    for name in (f"gradscope:{kind}:{number}", "mine"):
        made = two_layers()
        made.annotation(name, 205, 705)
        found.append(read_trace(made.save(tmp_path / "trace.json")).data)
    data, plain = found
    assert (data.workload.steps, data.ledger, data.device) == (plain.workload.steps, plain.ledger, plain.device)
    assert [row.backward_self_ns for row in data.layers] == [row.backward_self_ns for row in plain.layers]


@pytest.mark.parametrize("name", [["x"], {"a": 1}, 5, None])
def test_a_name_that_is_no_text_spoils_no_other_event(name: Any, tmp_path: Path) -> None:
    """One with shapes was in some of the columns and not in others: all events behind it had another's values."""
    made = two_layers()
    odd = {"ph": "X", "cat": "cpu_op", "name": name, "pid": 7, "tid": 10, "ts": 35, "dur": 1}
    made.events.insert(1, {**odd, "args": {"Input Dims": [[2, 2]], "Concrete Inputs": [""]}})
    data = read_trace(made.save(tmp_path / "odd.json")).data
    plain = read_trace(two_layers().save(tmp_path / "plain.json")).data
    assert (data.ledger, data.device) == (plain.ledger, plain.device)
    assert [row.flops for row in data.layers] == [row.flops for row in plain.layers]


@pytest.mark.parametrize("far", [-4e15, 4e15])
def test_times_that_are_decades_apart_are_refused(far: float, tmp_path: Path) -> None:
    """They do not fit into nanoseconds of 64 bits."""
    made = two_layers()
    made.op("aten::x", far, far + 1)
    with pytest.raises(TraceFileError, match="events that are more than 60 years apart") as raised:
        read_trace(made.save(tmp_path / "far.json"))
    assert str(raised.value).count("\n") == 1
    made.events[-1]["ts"] = far / 4  # 32 years, as of an event whose clock was never set
    assert read_trace(made.save(tmp_path / "near.json")).data.workload.steps == 2


def test_a_mark_of_the_encoding_is_no_part_of_the_trace(tmp_path: Path) -> None:
    """Windows puts a byte order mark before UTF-8."""
    path = two_layers().save(tmp_path / "bom.json")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_trace(path).data.workload.steps == 2


def test_a_module_without_a_name_is_none(tmp_path: Path) -> None:
    made = two_layers()
    made.add("python_function", "nn.Module: ", 5, 395, MAIN)
    assert all(row.class_name for row in read_trace(made.save(tmp_path / "odd.json")).data.layers)


def test_gzip_of_several_members(tmp_path: Path) -> None:
    """As bgzip writes it, and cat of two parts."""
    text = json.dumps({"traceEvents": two_layers().events}).encode()
    half = len(text) // 2
    path = tmp_path / "two.json.gz"
    path.write_bytes(gzip.compress(text[:half]) + gzip.compress(text[half:]))
    assert read_trace(path).data.workload.steps == 2


def test_rows_that_overlap_without_nesting(tmp_path: Path) -> None:
    """One that begins inside another and ends behind it is cut; what begins behind the cut is not inside of it."""
    made = Made()
    made.annotation("ProfilerStep#1", 0, 10_000)
    made.op("aten::mm", 100, 1_100, 5)
    made.annotation("## fetch ##", 500, 3_500)
    made.op("aten::add", 3_000, 3_400, 6)
    made.node("MmBackward0", 5_000, 6_000, 5)
    data = read_trace(made.save(tmp_path / "overlap.json")).data
    # The range's part inside aten::mm, 600, is the range's.
    assert {op.name: op.self_ns for op in data.ops if op.phase == "forward"} == {
        "aten::mm": 400_000,
        "aten::add": 400_000,
    }
    assert data.step.other_ns == 10_000_000 - 800_000 - 1_000_000
