"""The callbacks in the trainers that they are for."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

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


def hugging_face(folder: Path, callback: Any, accumulate: int = 1) -> list[float]:
    from transformers import Trainer, TrainingArguments, set_seed

    set_seed(0)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=20,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulate,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(Net(), arguments, train_dataset=Rows(), callbacks=[callback] if callback else [])
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def lightning(folder: Path, callback: Any, accumulate: int = 1) -> list[float]:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = Net(), []

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss = self.net(**batch)["loss"]
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    pl.seed_everything(0, verbose=False)
    module = Module()
    trainer = pl.Trainer(
        max_steps=20,
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        callbacks=[callback] if callback else [],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Rows(), batch_size=4))
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
    with pytest.warns(UserWarning, match="gradscope: the loop ended after 20 training steps"):
        train(tmp_path, callback)
    assert callback.report is None


@EACH
def test_no_rank_stops_by_itself(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = callback_of(train, None, **STEPS)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert not callback_of(train, None, stop=True)._measurement.stops
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    assert not callback._measurement.stops and callback_of(train, None, stop=True)._measurement.stops


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
