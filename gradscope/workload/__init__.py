"""What the user names, turned into something that can be run: a :class:`Workload` or a :class:`Script`.

``source`` parses a file without running it; ``target`` imports what a TARGET names; ``factory`` makes the workload of
it, at a batch size if asked; ``definition`` holds a model with its batch; ``script`` runs a training script as
``__main__``; ``step`` makes one training step of a workload.
"""

from gradscope.workload.definition import Workload, describe, is_one_batch, workload_from
from gradscope.workload.factory import Factory, accepts_batch_size
from gradscope.workload.script import Script, cut_own_frames, import_path
from gradscope.workload.source import file_kind
from gradscope.workload.step import Batches, call_model, resolve_device, scalar_loss, to_device
from gradscope.workload.target import load_factory, load_target

__all__ = [
    "Batches",
    "Factory",
    "Script",
    "Workload",
    "accepts_batch_size",
    "call_model",
    "cut_own_frames",
    "describe",
    "file_kind",
    "import_path",
    "is_one_batch",
    "load_factory",
    "load_target",
    "resolve_device",
    "scalar_loss",
    "to_device",
    "workload_from",
]
