"""The first rank waits for the others' files."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

import pytest

from gradscope.ranks.gather import gathered, nothing_comes
from gradscope.report.runfile import to_json
from tests.ranks.test_merged import FAST, SLOW, rank


def write(path: Path, number: int) -> Path:
    """Whole at once, as a rank writes its own."""
    beside = path.with_suffix(".part")
    beside.write_text(to_json(rank(number, SLOW if number else FAST, 1 if number else 41)), encoding="utf-8")
    return beside.replace(path)


def test_it_waits_until_all_have_written(tmp_path: Path) -> None:
    paths = [tmp_path / f"run.rank{number}.json" for number in range(2)]
    began = time.time() - 1
    write(paths[0], 0)
    later = threading.Timer(0.3, write, (paths[1], 1))
    later.start()
    merged, missing = gathered(paths, began)
    later.join()
    assert merged is not None and missing == []
    assert merged.straggler is not None and merged.straggler.ranks == (1,)


def test_files_of_another_run_do_not_count(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"run.rank{number}.json", number) for number in range(3)]
    began = time.time()
    os.utime(paths[2], (began - 60, began - 60))
    for path in paths[:2]:
        os.utime(path, (began + 1, began + 1))
    merged, missing = gathered(paths, began, seconds=0)
    assert merged is not None and len(merged.ranks) == 2
    assert missing == [paths[2]]


def test_a_rank_without_a_report_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains less than the others, or not at all."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    paths = [write(tmp_path / f"run.rank{number}.json", number) for number in range(2)]
    silent = tmp_path / "run.rank2.json"
    nothing_comes(silent)
    began = time.monotonic()
    merged, missing = gathered([*paths, silent], 0.0, seconds=60)
    assert time.monotonic() - began < 30
    assert merged is not None and missing == [silent]
    assert list((tmp_path / "temporary").iterdir()) == []  # nothing is left for another run


def test_one_file_is_nothing_to_compare(tmp_path: Path) -> None:
    paths = [write(tmp_path / "run.rank0.json", 0), tmp_path / "run.rank1.json"]
    assert gathered(paths, 0.0, seconds=0) == (None, [paths[1]])


def test_a_file_that_cannot_be_read_is_left_to_who_asks_for_it(tmp_path: Path) -> None:
    paths = [write(tmp_path / "run.rank0.json", 0), tmp_path / "run.rank1.json"]
    paths[1].write_text("{", encoding="utf-8")
    assert gathered(paths, 0.0, seconds=0) == (None, [])


def test_that_nothing_came_of_another_run_is_no_reason_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first rank was killed before it could look; or it ran in another folder, with files of these names."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    paths = [tmp_path / f"run.rank{number}.json" for number in range(2)]
    write(paths[0], 0)
    nothing_comes(paths[1])
    (old,) = (tmp_path / "temporary").iterdir()
    began = time.time() - 1
    os.utime(old, (began - 60, began - 60))
    nothing_comes(tmp_path / "elsewhere" / paths[1].name)
    later = threading.Timer(0.3, write, (paths[1], 1))
    later.start()
    merged, missing = gathered(paths, began)
    later.join()
    assert merged is not None and missing == []
