"""Language models: written out in one file, by hand, compiled, recurrent, convolutional."""

from __future__ import annotations

from field_programs.data import text_file, token_bins
from field_programs.program import Program

_NANOGPT = ("karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291")
_MAKEMORE = ("karpathy/makemore", "988aa59e4d8fefa526d06f3b453ad116258398d4")
_MINGPT = ("karpathy/minGPT", "37baab71b9abea1b76ab957409a1cc2fbfba8a26")
_TCN = ("locuslab/TCN", "2f8c2b817050206397458dfd1f5a25ce8a32fe65")

_SMALL_GPT = (
    "train.py --dataset=toy --device=cpu --n_layer=2 --n_head=2 --n_embd=64 --block_size=32 --batch_size=4 --max_iters=24"  # noqa: E501
    " --eval_iters=2 --eval_interval=20 --log_interval=1 --out_dir=out"
)
_MFU = (r"mfu -?[\d.]+%",)


def _nanogpt(name: str, options: str) -> Program:
    return Program(
        name, *_NANOGPT, f"{_SMALL_GPT} {options}", data=token_bins("data/toy"), varies=_MFU, files_vary=("out/*",)
    )


def _makemore(name: str, options: str) -> Program:
    return Program(
        name,
        *_MAKEMORE,
        f"makemore.py --max-steps 60 --batch-size 16 {options}",
        needs=("tensorboard",),
        files_vary=("out/*",),
    )


PROGRAMS: tuple[Program, ...] = (
    _nanogpt("nanogpt", "--compile=False --gradient_accumulation_steps=1"),
    _nanogpt("nanogpt-accumulation", "--compile=False --gradient_accumulation_steps=4 --dropout=0.1"),
    _nanogpt("nanogpt-compile", "--compile=True --gradient_accumulation_steps=1"),
    _makemore("makemore-transformer", "--type transformer -n 0"),
    _makemore("makemore-workers", "--type transformer -n 2"),
    _makemore("makemore-rnn", "--type rnn -n 0"),
    _makemore("makemore-gru", "--type gru -n 0"),
    _makemore("makemore-bow", "--type bow -n 0"),
    _makemore("makemore-mlp", "--type mlp -n 0"),
    _makemore("makemore-bigram", "--type bigram -n 0"),
    Program(
        "mingpt-adder",
        *_MINGPT,
        "projects/adder/adder.py --trainer.max_iters=40 --trainer.num_workers=0 --trainer.batch_size=16",
        environment={"PYTHONPATH": "."},
        files_vary=("out/adder/args.txt",),
    ),
    Program(
        "mingpt-chargpt",
        *_MINGPT,
        "projects/chargpt/chargpt.py --model.model_type=gpt-nano --data.block_size=32 --trainer.max_iters=30"
        " --trainer.batch_size=8 --trainer.num_workers=2",
        data=text_file("input.txt", start="O God, O God!\n"),
        environment={"PYTHONPATH": "."},
        files_vary=("out/chargpt/args.txt",),
    ),
    Program(
        "video-lecture-bigram",
        "karpathy/ng-video-lecture",
        "52201428ed7b46804849dea0b3ccf0de9df1a5c3",
        "bigram.py",
        without=("input.txt",),
        data=text_file("input.txt"),
    ),
    # Their --cuda turns it off.
    Program(
        "tcn-adding",
        *_TCN,
        "TCN/adding_problem/add_test.py --cuda --seq_len 40 --levels 3 --nhid 16 --epochs 1 --batch_size 1000 --log-interval 5",  # noqa: E501
        environment={"PYTHONPATH": "."},
    ),
    Program(
        "tcn-copy",
        *_TCN,
        "TCN/copy_memory/copymem_test.py --cuda --blank_len 40 --levels 3 --epochs 1 --batch_size 400 --iters 10",
        environment={"PYTHONPATH": "."},
        limit_s=400,
    ),
)
