"""The callbacks in the trainers that they are for."""

from __future__ import annotations

import copy
import gc
import json
import re
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import gradscope
from gradscope.errors import GradscopeError
from gradscope.integrations import measurement
from gradscope.report.runfile import load_run

STEPS = {"steps": 2, "warmup": 1, "memory": False}


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 128

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"x": torch.full((8,), float(number % 7)), "labels": torch.tensor(float(number % 2))}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.second(self.first(x).relu()).squeeze(-1)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


def hugging_face(folder: Path, callback: Any, accumulate: int = 1, every: str = "", **options: Any) -> list[float]:
    """``every``: what is done after each step, "evaluation" or "save"; the callback may be several."""
    from transformers import Trainer, TrainingArguments, set_seed

    set_seed(0)
    arguments = TrainingArguments(
        output_dir=str(folder / "saved"),
        max_steps=20,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulate,
        report_to=[],
        logging_steps=1,
        save_strategy="steps" if every == "save" else "no",
        save_steps=1,
        save_total_limit=1,
        eval_strategy="steps" if every == "evaluation" else "no",
        eval_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    trainer = Trainer(Net(), arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=listed(callback))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def listed(callback: Any) -> list[Any]:
    return callback if isinstance(callback, list) else [callback] if callback else []


def lightning(folder: Path, callback: Any, accumulate: int = 1, every: str = "", **options: Any) -> list[float]:
    """As ``hugging_face``."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = Net(), []

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss = self.net(**batch)["loss"]
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
            self.net(**batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    pl.seed_everything(0, verbose=False)
    module = Module()
    trainer = pl.Trainer(
        max_steps=20,
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        callbacks=[
            *listed(callback),
            *([ModelCheckpoint(folder / "saved", every_n_train_steps=1)] * (every == "save")),
        ],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=every == "save",
        val_check_interval=options.pop("between", accumulate),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    others = DataLoader(Rows(), batch_size=4) if every == "evaluation" else None
    trainer.fit(module, DataLoader(Rows(), batch_size=4), others)
    return module.losses


def callback_of(train: Any, *args: Any, **options: Any) -> Any:
    if train is hugging_face:
        from gradscope.integrations.transformers import GradscopeCallback
    else:
        from gradscope.integrations.lightning import GradscopeCallback  # type: ignore[assignment]
    return GradscopeCallback(*args, **options)


pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainers' own
EACH = pytest.mark.parametrize("train", [hugging_face, lightning])


@EACH
def test_it_reports_and_changes_nothing(train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = callback_of(train, str(tmp_path / "run"), **STEPS)
    assert train(tmp_path, callback) == train(tmp_path, None)
    assert callback.report is not None
    record = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert record["workload"]["steps"] == 2 and (tmp_path / "run.html").exists()
    assert {"first", "second"} <= {row["path"].split(".")[-1] for row in record["layers"]}
    assert "Layers" in capsys.readouterr().out


@EACH
def test_batches_that_accumulate_are_one_step(train: Any, tmp_path: Path) -> None:
    callback = callback_of(train, None, **STEPS)
    train(tmp_path, callback, accumulate=3)
    (row,) = [row for row in callback.report.data.layers if row.path.split(".")[-1] == "first"]
    assert row.calls == 3
    assert not list(tmp_path.glob("*.json"))


@EACH
def test_it_ends_the_training_where_asked_to(train: Any, tmp_path: Path) -> None:
    losses = train(tmp_path, callback_of(train, None, stop=True, **STEPS))
    assert 2 < len(losses) < 20


@EACH
def test_a_training_that_is_too_short_is_said(train: Any, tmp_path: Path) -> None:
    callback = callback_of(train, None, steps=50, warmup=30)
    with pytest.warns(
        UserWarning, match=r"gradscope: the loop ended after 20 training steps(.|\n)* warmup=1, steps=1 needs"
    ):
        train(tmp_path, callback)
    assert callback.report is None


@EACH
@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_stops_by_itself_and_each_writes_its_files(
    train: Any, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it is asked of once training has begun: Lightning makes its process group after the callbacks."""
    callback = callback_of(train, str(tmp_path / "run"), stop=True, **STEPS)
    monkeypatch.setattr(measurement, "rank_and_size", lambda: (rank, 2))
    assert len(train(tmp_path, callback)) == 20
    assert sorted(path.name for path in tmp_path.glob("run*")) == [f"run.rank{rank}.html", f"run.rank{rank}.json"]
    assert ("Layers" in capsys.readouterr().out) == (rank == 0)


def test_ranks_are_those_of_the_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lightning's own launcher sets no RANK."""
    measured = measurement.Measurement(tmp_path / "run", dict(STEPS), stop=True)
    for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    steps_of(measured, 20)
    assert (tmp_path / "run.rank1.json").exists() and not measured.stops and not capsys.readouterr().out


def steps_of(measured: measurement.Measurement, steps: int) -> None:
    model, training = nn.Linear(8, 1), Rows()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    measured.begin(model, training)
    for _ in range(steps):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        measured.step()
    measured.end()


# --------------------------------------------------------------------------------------------------------------------
# What runs between steps
# --------------------------------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("every", ["evaluation", "save"])
def test_what_runs_between_steps_is_in_none_of_them(train: Any, every: str, tmp_path: Path) -> None:
    callback = callback_of(train, None, steps=2, warmup=1)
    assert train(tmp_path, callback, every=every) == train(tmp_path, None, every=every)
    run = callback.report.data
    (row,) = [row for row in run.layers if row.path.split(".")[-1] == "first"]
    assert row.calls == 1  # an evaluation calls it 16 or 32 times
    assert run.memory is not None and run.memory.backward_passes == 1 and run.lines and not run.partial
    assert len({span.layer for span in run.memory.spans or () if span.phase == "forward"}) <= len(run.layers)
    (note,) = [note for note in run.notes if "training step" in note]
    assert note == "what ran between training steps, such as an evaluation or saving, is in none of them"


@EACH
def test_an_evaluation_of_accumulated_steps_is_in_none_of_them(train: Any, tmp_path: Path) -> None:
    callback = callback_of(train, None, **STEPS)
    train(tmp_path, callback, accumulate=3, every="evaluation")
    (row,) = [row for row in callback.report.data.layers if row.path.split(".")[-1] == "first"]
    assert row.calls == 3


def test_a_step_that_an_evaluation_runs_inside_of_is_left_out(tmp_path: Path) -> None:
    """Every second batch is followed by one, and a step takes three: of two steps one is whole."""
    callback = callback_of(lightning, None, **STEPS)
    with pytest.warns(
        UserWarning, match="gradscope: an evaluation, or something like it, ran inside 20 training steps"
    ):
        lightning(tmp_path, callback, accumulate=2, every="evaluation", between=1)
    assert callback.report is None


def test_a_loop_of_ones_own_leaves_out_what_it_says(tmp_path: Path) -> None:
    model, x = nn.Linear(8, 8), torch.ones(4, 8)
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        for _ in range(20):
            model(x).sum().backward()
            if prof.step():
                break
            prof.pause()
            for _ in range(5):
                model(x)
            prof.resume()
    assert [row.calls for row in prof.report.data.layers] == [1]
    memory = prof.report.data.memory
    assert memory is not None and memory.backward_passes == 1


@pytest.mark.parametrize("hook", ["on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"])
def test_what_is_evaluated_inside_a_step_is_no_part_of_one(hook: str, tmp_path: Path) -> None:
    """Every second step is whole: it has the calls of all its batches."""
    from transformers import TrainerCallback

    class Evaluates(TrainerCallback):
        pass

    other, callback = Evaluates(), callback_of(hugging_face, None, **STEPS)

    def evaluate(_args: Any, state: Any, *_rest: Any, model: nn.Module, **_options: Any) -> None:
        if state.global_step % 2:
            with torch.no_grad():
                model(torch.ones(4, 8), torch.ones(4))
            callback.on_prediction_step()
            callback.on_evaluate()

    setattr(other, hook, evaluate)
    hugging_face(tmp_path, [callback, other], accumulate=2)
    (row,) = [row for row in callback.report.data.layers if row.path.split(".")[-1] == "first"]
    assert row.calls == 2


def test_an_evaluation_before_a_steps_first_batch_cuts_nothing(tmp_path: Path) -> None:
    """Though the step has begun for the trainer."""
    from transformers import TrainerCallback

    callback = callback_of(hugging_face, None, **STEPS)

    class Evaluates(TrainerCallback):
        def on_step_begin(self, *_args: Any, model: nn.Module, **_options: Any) -> None:
            with torch.no_grad():
                model(torch.ones(4, 8), torch.ones(4))
            callback.on_prediction_step()
            callback.on_evaluate()

    hugging_face(tmp_path, [callback, Evaluates()], accumulate=2)
    (row,) = [row for row in callback.report.data.layers if row.path.split(".")[-1] == "first"]
    assert row.calls == 2


def test_a_step_that_was_paused_after_its_forward_pass_is_left_out() -> None:
    model, x = nn.Linear(8, 8), torch.ones(4, 8)
    with gradscope.profiling(model, steps=2, warmup=1, memory=False) as prof:
        for number in range(30):
            loss = model(x).sum()
            if number % 2:
                prof.pause()
                prof.resume()
            loss.backward()
            if prof.step():
                break
    assert [row.calls for row in prof.report.data.layers] == [1]
    assert prof._session.capture.steps_cut == number // 2


# --------------------------------------------------------------------------------------------------------------------
# What goes wrong
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "options", "message"),
    [
        ("missing/run", {}, "missing/run.json cannot be written: the folder .*missing does not exist"),
        ("", {}, "output is '', which names no file"),
        ("folder/", {}, "output is 'folder/', which names no file"),
        (3, {}, "output is 3; it must be a path"),
        ("run", {"stepz": 3}, "stepz is no option of GradscopeCallback.\nThere are output, stop, steps, warmup,"),
        ("run", {"steps": 0}, "steps is 0; it must be"),
        ("run", {"ignore": ["nope"]}, "nope"),
        ("run", {"model": None}, "model is no option"),
    ],
)
@EACH
def test_what_cannot_be_done_is_said_before_training(
    train: Any, output: Any, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GradscopeError, match=message):
        callback_of(train, output, **options)


@pytest.mark.parametrize(
    ("owner", "name", "left"),
    [
        (gradscope.profiling, "__enter__", set()),
        (gradscope.profiling, "step", set()),
        (gradscope.Report, "print", {"run.json", "run.html"}),
        (gradscope.Report, "save", {"run.html"}),
        (gradscope.Report, "to_html", {"run.json"}),
    ],
)
@EACH
def test_training_goes_on_whatever_fails(
    train: Any, owner: Any, name: str, left: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_args: Any, **_options: Any) -> None:
        raise OSError(28, "No space left on device")

    callback = callback_of(train, str(tmp_path / "run"), **STEPS)
    with monkeypatch.context() as patched, pytest.warns(UserWarning, match="gradscope: .*No space left on device"):
        patched.setattr(owner, name, fails)
        assert len(train(tmp_path, callback)) == 20
    assert {path.name for path in tmp_path.glob("run*")} == left


@EACH
@pytest.mark.parametrize(("name", "other"), [("run.html", "run.json"), ("run.json", "run.html")])
def test_files_of_others_stay_and_its_own_are_replaced(train: Any, name: str, other: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("<p>mine", encoding="utf-8")
    with pytest.warns(UserWarning, match="gradscope: .*holds something else, so run-2.json is written"):
        train(tmp_path, callback_of(train, str(tmp_path / "run"), **STEPS))
    assert (tmp_path / name).read_text(encoding="utf-8") == "<p>mine" and not (tmp_path / other).exists()
    (tmp_path / name).unlink()
    for steps in (2, 3):
        train(tmp_path, callback_of(train, str(tmp_path / "run"), steps=steps, warmup=1, memory=False))
    assert sorted(path.name for path in tmp_path.glob("run*")) == ["run-2.html", "run-2.json", "run.html", "run.json"]
    assert load_run(tmp_path / "run.json").workload.steps == 3
    assert "3 steps" in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_a_training_that_failed_keeps_nothing_from_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers tells no callback of an exception, and whoever holds the trainer holds them."""
    forward, calls = Net.forward, []

    def fails(net: Net, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        calls.append(1)
        if len(calls) % 3 == 0:
            raise OSError("disk")
        return forward(net, x, labels)

    left = [callback_of(hugging_face, None, **STEPS) for _ in range(3)]
    with monkeypatch.context() as patched:
        patched.setattr(Net, "forward", fails)
        for callback in left[:2]:
            with pytest.raises(OSError, match="disk"):
                hugging_face(tmp_path, callback)
    hugging_face(tmp_path, left[1])
    hugging_face(tmp_path, left[2])
    assert left[0].report is None and left[1].report is not None and left[2].report is not None


def test_a_training_that_failed_keeps_nothing_from_gradscope(tmp_path: Path) -> None:
    left = measurement.Measurement(None, dict(STEPS))
    left.begin(nn.Linear(2, 2), Rows())
    report = gradscope.profile(nn.Linear(2, 2), torch.ones(1, 2), steps=1, warmup=1)
    assert report.data.workload.steps == 1
    left.step()  # it is over, and may say so
    assert left.report is None


class Within:
    """Does something at the end of the third step."""

    def __new__(cls, run: Any) -> Any:
        from transformers import TrainerCallback

        def on_step_end(_self: Any, _args: Any, state: Any, *_rest: Any, **_options: Any) -> None:
            if state.global_step == 3:
                run()

        return type("Within", (TrainerCallback,), {"on_step_end": on_step_end})()


DISPLACED = (
    "gradscope: another measurement began after step [23] of this training, which ended this one.\nMeasure before"
)


def test_a_training_goes_on_where_another_measurement_ends_its_own(tmp_path: Path) -> None:
    """``stop`` is for what has been measured."""
    callback = callback_of(hugging_face, None, stop=True, steps=5, warmup=3)
    other = Within(lambda: gradscope.profile(nn.Linear(2, 2), torch.ones(1, 2), steps=1, warmup=1))
    with pytest.warns(UserWarning, match=DISPLACED) as heard:
        assert len(hugging_face(tmp_path, [callback, other])) == 20
    assert callback.report is None and not [each for each in heard if "loop ended" in str(each.message)]


def test_of_nested_trainings_the_outer_one_says_that_it_is_measured_no_further(tmp_path: Path) -> None:
    inner, outer = (callback_of(hugging_face, None, **STEPS) for _ in range(2))
    with pytest.warns(UserWarning, match=DISPLACED):
        hugging_face(tmp_path, [outer, Within(lambda: hugging_face(tmp_path, inner))])
    assert inner.report is not None and outer.report is None


def test_a_training_of_another_thread_is_not_ended() -> None:
    """What it has put up is that thread's."""
    left, measured = (measurement.Measurement(None, dict(STEPS)) for _ in range(2))
    begun, hold, model, rows = threading.Event(), threading.Event(), nn.Linear(2, 2), Rows()

    def trains() -> None:
        left.begin(model, rows)
        left.step()
        begun.set()
        hold.wait()
        left.drop()

    thread = threading.Thread(target=trains)
    thread.start()
    begun.wait()
    try:
        with pytest.warns(
            UserWarning, match="gradscope: this training is not measured: gradscope is already measuring"
        ):
            measured.begin(model, Rows())
        assert left._prof is not None and not left._prof._session._closed
    finally:
        hold.set()
        thread.join()


@EACH
def test_of_two_callbacks_one_measures(train: Any, tmp_path: Path) -> None:
    both = [callback_of(train, None, **STEPS), callback_of(train, None, stop=True, **STEPS)]
    with pytest.warns(UserWarning, match="gradscope: another callback of gradscope measures this training"):
        assert len(train(tmp_path, both)) == 20
    assert both[0].report is not None and both[1].report is None


@EACH
def test_where_a_profiler_runs_it_trains_unmeasured(train: Any, tmp_path: Path) -> None:
    callback = callback_of(train, None, **STEPS)
    with pytest.warns(UserWarning, match="gradscope: .*profiler"), torch.profiler.profile():
        assert len(train(tmp_path, callback)) == 20
    assert callback.report is None


@EACH
def test_inside_a_measurement_it_does_nothing(train: Any, tmp_path: Path) -> None:
    """As a script with a callback under ``gradscope profile``, which sees the training by itself."""
    callback = callback_of(train, str(tmp_path / "run"), **STEPS)
    with warnings.catch_warnings(record=True) as heard, gradscope.profiling(steps=1, warmup=1) as prof:
        warnings.simplefilter("always")
        assert len(train(tmp_path, callback)) == 20
        assert not prof.step()  # it goes on
    assert not [each for each in heard if str(each.message).startswith("gradscope")]
    assert callback.report is None and not list(tmp_path.glob("run*"))


@EACH
def test_a_second_training_is_not_measured_again(train: Any, tmp_path: Path) -> None:
    callback = callback_of(train, None, **STEPS)
    train(tmp_path, callback)
    report = callback.report
    train(tmp_path, callback)
    assert callback.report is report is not None


def test_a_copy_of_a_callback_runs_nothing() -> None:
    measured = measurement.Measurement(None, dict(STEPS))
    measured.begin(nn.Linear(2, 2), Rows())
    other = copy.deepcopy(measured)
    assert other._prof is None and measured._prof is not None
    measured.drop()


def test_a_resumed_training_has_taken_no_step_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    callback, steps = callback_of(lightning, None), []
    monkeypatch.setattr(measurement.Measurement, "begin", lambda *_: None)
    monkeypatch.setattr(measurement.Measurement, "step", lambda _: steps.append(1))
    trainer = SimpleNamespace(global_step=10)
    callback.on_train_start(trainer, None)
    callback.on_train_batch_end(trainer)  # accumulates
    assert not steps
    trainer.global_step = 11
    callback.on_train_batch_end(trainer)
    assert len(steps) == 1


def test_optimizers_that_lightning_does_not_see_step_are_said(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    class ByHand(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = Net(), False

        def training_step(self, batch: dict[str, Tensor], _: int) -> None:
            optimizer: Any = self.optimizers(use_pl_optimizer=False)
            optimizer.zero_grad()
            self.manual_backward(self.net(**batch)["loss"])
            optimizer.step()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    callbacks = [callback_of(lightning, None, **STEPS)]
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=callbacks, logger=False, **quiet)  # type: ignore
    with pytest.warns(UserWarning, match="where trainer.global_step grows, which it did not in 32 batches"):
        trainer.fit(ByHand(), DataLoader(Rows(), batch_size=4))


@EACH
def test_an_error_in_training_leaves_nothing_behind(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.autograd import graph

    before = graph._engine_run_backward
    forward, calls = Net.forward, []

    def fails(net: Net, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        calls.append(1)
        if len(calls) > 2:
            raise OSError("disk")
        return forward(net, x, labels)

    monkeypatch.setattr(Net, "forward", fails)
    callback = callback_of(train, None, **STEPS)
    with pytest.raises(OSError, match="disk"):
        train(tmp_path, callback)
    del callback
    gc.collect()
    assert graph._engine_run_backward is before


def test_the_pages_loop_of_accelerate_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/trainers.md, as it stands."""
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(from accelerate.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {
        "model": nn.Linear(8, 1),
        "loader": DataLoader(Rows(), batch_size=4),
        "loss_of": lambda model, batch: model(batch["x"]).squeeze(-1).sub(batch["labels"]).square().mean(),
    }
    exec(compile(block, "docs/trainers.md", "exec"), names)
    assert (tmp_path / "accelerate.json").exists()
