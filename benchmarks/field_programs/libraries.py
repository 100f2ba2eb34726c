"""Training that a library runs: its own loop, wrappers around the model and the optimizer, shards of parameters.

The libraries are the programs here; what configures them is a few lines, written below the clone or beside the data.
"""

from __future__ import annotations

from field_programs.data import config_file, mnist, together
from field_programs.program import INSTALLED, Program

_ONE_PROCESS = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533",
}  # fmt: skip

_TRAINER = """\
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 128, (96, 32))]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=24, logging_steps=1, report_to=[],
    save_strategy="no", use_cpu=True, disable_tqdm=True, OPTIONS
)
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.train()
for record in trainer.state.log_history:
    print(record.get("step"), record.get("loss"), record.get("grad_norm"))
"""
_PEFT = """\
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
base = LlamaForCausalLM(
    LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
)
model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
model.enable_input_require_grads()
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(24):
    rows = torch.randint(0, 128, (4, 32))
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
"""
_KERAS = """\
import keras
import numpy as np

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((16,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dropout(0.1),
                          keras.layers.Dense(4, activation="softmax")])
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
draw = np.random.default_rng(0)
history = model.fit(draw.normal(size=(240, 16)), draw.integers(0, 4, 240), batch_size=8, epochs=2, verbose=0)
print(history.history["loss"])
"""  # noqa: E501
# What the repository's own example.py does on two GPUs, on the CPU in one process.
_FSDP = """\
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from model import ModelArgs, Transformer

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = Transformer(ModelArgs(n_layers=2, n_heads=2, dim=32, vocab_size=64, max_seq_len=16, dropout_p=0))
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(24):
    loss = model(torch.randint(0, 64, (4, 16))).logsumexp(-1).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
torch.distributed.destroy_process_group()
"""
_DDP = """\
import torch
from torch.nn.parallel import DistributedDataParallel
from model import ModelArgs, Transformer

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Transformer(ModelArgs(n_layers=2, n_heads=2, dim=32, vocab_size=64, max_seq_len=16, dropout_p=0.1)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(24):
    loss = model(torch.randint(0, 64, (4, 16))).logsumexp(-1).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
torch.distributed.destroy_process_group()
"""  # noqa: E501
_TENSOR_PARALLEL = """\
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (1,))
torch.manual_seed(0)
model = torch.nn.Sequential()
model.add_module("in_proj", torch.nn.Linear(10, 32))
model.add_module("relu", torch.nn.ReLU())
model.add_module("out_proj", torch.nn.Linear(32, 5))
model = parallelize_module(model, mesh, {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, foreach=True)
for step in range(24):
    loss = model(torch.rand(20, 10)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
torch.distributed.destroy_process_group()
"""
_LIGHTNING = ("Lightning-AI/pytorch-lightning", "7f0c3436cd3f6ad3753125672024fc415cbcb414")
_EXAMPLES = ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8")


def _trainer(name: str, options: str = "") -> Program:
    text = _TRAINER.replace("OPTIONS", options)
    needs = ("transformers", "accelerate")
    return Program(
        name,
        INSTALLED,
        "transformers",
        "train.py",
        data=config_file("train.py", text),
        needs=needs,
        varies=(r"'train_(?:runtime|samples_per_second|steps_per_second)': '[\d.]+'",),
        library=True,
    )


def _sharded(name: str, text: str) -> Program:
    return Program(
        name,
        *_EXAMPLES,
        "ours_train.py",
        folder="distributed/FSDP2",
        data=config_file("ours_train.py", text),
        without=("word_language_model/data/*",),
        environment=_ONE_PROCESS,
    )


PROGRAMS: tuple[Program, ...] = (
    _trainer("transformers-trainer"),
    _trainer("transformers-trainer-bf16-checkpoints", "bf16=True, gradient_checkpointing=True"),
    Program(
        "peft-lora",
        INSTALLED,
        "peft",
        "train.py",
        data=config_file("train.py", _PEFT),
        needs=("peft", "transformers"),
        library=True,
    ),
    Program(
        "keras-on-torch",
        INSTALLED,
        "keras",
        "train.py",
        data=config_file("train.py", _KERAS),
        needs=("keras", "h5py", "optree"),
        environment={"KERAS_BACKEND": "torch"},
        library=True,
    ),
    _sharded("fsdp2", _FSDP),
    _sharded("ddp", _DDP),
    _sharded("tensor-parallel", _TENSOR_PARALLEL),
    Program(
        "lightning-autoencoder",
        *_LIGHTNING,
        "examples/pytorch/basics/autoencoder.py --trainer.max_epochs=1 --trainer.limit_train_batches=24 --trainer.limit_val_batches=2"  # noqa: E501
        " --trainer.limit_test_batches=2 --trainer.limit_predict_batches=2 --trainer.accelerator=cpu --trainer.log_every_n_steps=1",  # noqa: E501
        without=("docs/*", "tests/*", "src/*"),
        data=together(mnist("examples/Datasets", 60000, 200), mnist("data", 64, 64)),  # Lightning looks for its own
        needs=("lightning", "torchvision", "jsonargparse"),
        files_vary=("lightning_logs/*",),
        library=True,
        limit_s=600,
    ),
)
