"""What the user names, turned into something that can be run: a :class:`Workload` or a :class:`Script`.

``source`` parses a file without running it; ``target`` loads what a TARGET names; ``definition`` holds a model with
its batch; ``script`` runs a training script as ``__main__``; ``step`` makes one training step of a workload.
"""

from gradscope.workload.definition import Workload
from gradscope.workload.frames import cut_own_frames
from gradscope.workload.script import Script, import_path
from gradscope.workload.source import file_kind
from gradscope.workload.step import Batches, call_model, resolve_device, scalar_loss
from gradscope.workload.target import load_target

__all__ = [
    "Batches",
    "Script",
    "Workload",
    "call_model",
    "cut_own_frames",
    "file_kind",
    "import_path",
    "load_target",
    "resolve_device",
    "scalar_loss",
]
