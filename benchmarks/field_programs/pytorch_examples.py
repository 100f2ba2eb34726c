"""PyTorch's own examples, which half of the training programs of the world began as."""

from __future__ import annotations

from field_programs.data import Maker, mnist, pictures, together, word_corpus
from field_programs.program import Program

_EXAMPLES = ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8")
_GYM = ("gymnasium",)
_VISION = ("torchvision",)


def _example(folder: str, command: str, name: str = "", data: Maker | None = None, **more: object) -> Program:
    made = {"without": ("word_language_model/data/*",), **more}
    return Program(f"examples-{name or folder}", *_EXAMPLES, command, folder=folder, data=data, **made)  # type: ignore[arg-type]


def _words(model: str, options: str = "") -> Program:
    command = f"main.py --model {model} --emsize 32 --nhid 32 --epochs 2 --bptt 10 --log-interval 5 {options}"
    data = word_corpus("data/wikitext-2")
    name = f"word-{model.lower()}{'-tied' if 'tied' in options else ''}"
    return _example("word_language_model", command, name, data, varies=(r"ms/batch +[\d.]+",))


PROGRAMS: tuple[Program, ...] = (
    _words("LSTM", "--tied"),
    _words("GRU"),
    _words("RNN_TANH"),
    _words("Transformer", "--lr 0.01 --use-optimizer"),
    _example("regression", "main.py", seed=3),
    _example("mnist", "main.py --epochs 1 --batch-size 16 --log-interval 1", data=mnist("../data", 480), needs=_VISION),
    _example("mnist_rnn", "main.py --epochs 1 --batch-size 16 --log-interval 1", data=mnist("../data"), needs=_VISION),
    _example(
        "mnist_forward_forward", "main.py --epochs 15 --train_size 200", data=mnist("data"), needs=_VISION, seed=1
    ),
    _example("vae", "main.py --epochs 2 --batch-size 32 --log-interval 1", data=mnist("../data"), needs=_VISION),
    _example(
        "siamese_network",
        "main.py --epochs 1 --batch-size 16 --log-interval 1",
        data=mnist("../data"),
        needs=_VISION,
        seed=3,
    ),
    _example(
        "dcgan",
        "main.py --dataset folder --dataroot pictures --imageSize 64 --batchSize 4 --ngf 8 --ndf 8 --niter 3 --workers 0 --manualSeed 3",  # noqa: E501
        data=pictures("pictures/one", 40),
        needs=_VISION,
    ),
    _example(
        "super_resolution",
        "main.py --upscale_factor 2 --batchSize 1 --nEpochs 2 --threads 0",
        data=together(
            pictures("dataset/BSDS300/images/train", 16, 256, "jpg"),
            pictures("dataset/BSDS300/images/test", 4, 256, "jpg", 1),
        ),
        needs=("torchvision", "six"),
    ),
    _example(
        "imagenet",
        "main.py -a resnet18 --epochs 1 -b 2 -j 0 -p 1 --no-accel --seed 3 pictures",
        data=together(
            *(
                pictures(f"pictures/{part}/{kind}", count, 256, "jpg", seed)
                for seed, (part, count) in enumerate((("train", 24), ("val", 2)))
                for kind in ("a", "b")
            )
        ),
        needs=_VISION,
    ),
    _example("reinforcement_learning", "reinforce.py --log-interval 1", "reinforce", needs=_GYM, endless=True),
    _example("reinforcement_learning", "actor_critic.py --log-interval 1", "actor-critic", needs=_GYM, endless=True),
)
