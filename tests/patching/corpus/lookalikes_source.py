"""Patterns that are right as graphs, in sources that cannot be rewritten, or not without care.

As in lookalikes_attention: with sites and a reason, either is right, and no other site is.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import math
import shutil
import sys
import tempfile
import types
import warnings
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.patching.corpus.entry import Entry
from tests.patching.corpus.lookalikes_attention import HEADS, SIZE, TOKENS, WIDTH, Attention, PlainCausal, tokens


class Around(nn.Module):
    """A layer on each side, so that the module under test is not the root."""

    def __init__(self, attn):
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.attn = attn

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        return x + self.attn(x)


# --------------------------------------------------------------------------------------------------------------------
# No source, or not the one that runs
# --------------------------------------------------------------------------------------------------------------------


class LambdaForward(Attention):
    forward = lambda self, x: self.merge(self.weights(*self.qkv(x)[:2]) @ self.qkv(x)[2])  # noqa: E731

    weights = lambda self, q, k: ((q @ k.transpose(-2, -1)) * SIZE**-0.5).softmax(-1)  # noqa: E731


_SOURCE = """
class Written(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * 10**-0.5
        att = att.masked_fill(self.mask == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        return self.merge(att @ v)
"""


def from_exec():
    """The class came out of a string: there is no file."""
    names = {"Attention": Attention, "F": F, "__name__": "generated"}
    exec(_SOURCE, names)
    return Around(names["Written"]()), tokens()


def from_exec_with_a_name():
    """The code names a file that exists and holds something else at those lines."""
    names = {"Attention": Attention, "F": F, "__name__": __name__}
    exec(compile(_SOURCE, __file__, "exec"), names)
    return Around(names["Written"]()), tokens()


def logged(forward):
    @functools.wraps(forward)
    def wrapper(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return 2 * forward(self, x)

    return wrapper


class Decorated(Attention):
    @logged
    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        att = att.masked_fill(self.mask == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        return self.merge(att @ v)


class WithoutGradient(Attention):
    """A frozen teacher: what is rewritten must stay without gradient."""

    @torch.no_grad()
    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        att = att.masked_fill(self.mask == 0, float("-inf"))
        return self.merge(att.softmax(dim=-1) @ v)


class Disabled(Attention):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        q, k, v = self.qkv(x.float())
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        att = att.masked_fill(self.mask == 0, float("-inf"))
        return self.merge(att.softmax(dim=-1) @ v)


def scripted():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script")  # torch deprecates it; models still have it
        return Around(torch.jit.script(Scripted())), tokens()


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(40, 120)
        self.proj = nn.Linear(40, 40)

    def forward(self, x):
        B, T, C = x.shape  # noqa: N806
        q, k, v = self.qkv(x).split(40, dim=2)
        q = q.view(B, T, 4, 10).transpose(1, 2)
        k = k.view(B, T, 4, 10).transpose(1, 2)
        v = v.view(B, T, 4, 10).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * 0.31622776601683794
        y = torch.softmax(att, dim=-1) @ v
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


def cooler(self, x):
    q, k, v = self.qkv(x)
    att = (q @ k.transpose(-2, -1)) / 7.0
    att = att.masked_fill(self.mask == 0, float("-inf"))
    return self.merge(att.softmax(dim=-1) @ v)


def replaced_on_instance():
    """The class's forward is not what runs."""
    model = PlainCausal()
    model.forward = types.MethodType(cooler, model)
    return Around(model), tokens()


def replaced_by_partial():
    model = PlainCausal()
    model.forward = functools.partial(cooler, model)
    return Around(model), tokens()


class OwnCall(Attention):
    """__call__ is the module's own and does more than forward."""

    def __call__(self, x):
        return super().__call__(x * 0.5)

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        att = att.masked_fill(self.mask == 0, float("-inf"))
        return self.merge(att.softmax(dim=-1) @ v)


_FILE = '''"""A model in a file of its own."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width=40, heads=4):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (f(x).view(B, T, self.heads, C // self.heads).transpose(1, 2)
                   for f in (self.query, self.key, self.value))
        att = (q @ k.transpose(-2, -1)) / math.sqrt(C // self.heads)
        mask = torch.tril(torch.ones(T, T, device=x.device)).bool()
        att = att.masked_fill(~mask, float("-inf"))
        att = F.softmax(att, dim=-1)
        y = (att @ v).transpose(1, 2).reshape(B, T, C)
        return self.proj(y)
'''
_EDITS = {
    "value": lambda text: text.replace("math.sqrt(C // self.heads)", "math.sqrt(C)             "),  # no line moves
    "moved": lambda text: text.replace("import math\n", "import math\nimport os\nimport sys\n"),
    "emptied": lambda text: "# nothing left\n",
    "gone": None,
}


def _imported(path, name):
    """The file as a module under that name, with no compiled copy beside it."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = written
    return module


def changed_on_disk(edit):
    """The file is edited after its import: what runs is no longer what stands there."""
    folder = tempfile.mkdtemp(prefix="gradscope-corpus-")
    path = Path(folder) / "changed_model.py"
    path.write_text(_FILE, encoding="utf-8")
    name = f"corpus_changed_{Path(folder).name.rpartition('-')[2]}"
    module = _imported(path, name)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # not sooner: a deep copy of the model needs it too
    change = _EDITS[edit]
    if change is None:
        path.unlink()
    else:
        path.write_text(change(_FILE), encoding="utf-8")
    return module.Attention(), tokens()


# --------------------------------------------------------------------------------------------------------------------
# One source, several behaviours
# --------------------------------------------------------------------------------------------------------------------


class TwoManners(Attention):
    def forward(self, x, causal):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        if causal:
            att = att.masked_fill(self.mask == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        return self.merge(att @ v)


class CalledTwice(nn.Module):
    """One module: causal at the first call, not at the second."""

    def __init__(self):
        super().__init__()
        self.attn = TwoManners()

    def forward(self, x):
        x = x + self.attn(x, causal=True)
        return x + self.attn(x, causal=False)


class ByLayer(Attention):
    def __init__(self, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, x):
        q, k, v = self.qkv(x)
        if self.layer_idx == 0:
            att = q @ k.transpose(-2, -1) / math.sqrt(SIZE)
        else:
            att = q @ k.transpose(-2, -1) / (math.sqrt(SIZE) * (self.layer_idx + 1))
        att = att.masked_fill(self.mask == 0, float("-inf"))
        return self.merge(att.softmax(dim=-1) @ v)


class ByStep(Attention):
    """Warms up: the first calls are scaled another way, so that one recorded run tells half of it."""

    def __init__(self):
        super().__init__()
        self.step = 0

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * (SIZE**-0.5 if self.step < 2 else 1.0 / SIZE)
        self.step += 1
        return self.merge(att.softmax(dim=-1) @ v)


class ByTraining(Attention):
    """Another scale in eval."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * (SIZE**-0.5 if self.training else 0.25)
        return self.merge(att.softmax(dim=-1) @ v)


class Recursive(Attention):
    """Goes through itself until the depth is used up."""

    def forward(self, x, depth=2):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(SIZE * depth))
        att = att.masked_fill(self.mask == 0, float("-inf"))
        y = self.merge(att.softmax(dim=-1) @ v)
        return y if depth == 1 else self(y, depth - 1)


# --------------------------------------------------------------------------------------------------------------------
# Sources of an odd form
# --------------------------------------------------------------------------------------------------------------------


class SplitOverTwo(Attention):
    def weights(self, q, k):
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        return att.masked_fill(self.mask == 0, float("-inf")).softmax(dim=-1)

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = self.weights(q, k)
        return self.merge(self.attn_drop(att) @ v)


class Generator(Attention):
    """Each head is yielded; between two of them the caller runs."""

    def each(self, q, k, v):
        for h in range(HEADS):
            att = (q[:, h] @ k[:, h].transpose(-2, -1)) * SIZE**-0.5
            seen = yield att.shape
            att = att.softmax(-1) * (1.0 if seen is None else seen)
            yield att @ v[:, h]

    def forward(self, x):
        running, heads = self.each(*self.qkv(x)), []
        for _ in range(HEADS):
            next(running)
            heads.append(running.send(1.0 + 0.1 * len(heads)))
        return self.merge(torch.stack(heads, dim=1))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.key = nn.Linear(WIDTH, SIZE, bias=False)
        self.query = nn.Linear(WIDTH, SIZE, bias=False)
        self.value = nn.Linear(WIDTH, SIZE, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(TOKENS, TOKENS)))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        B, T, C = x.shape  # noqa: N806, RUF059
        k, q = self.key(x), self.query(x)  # (B,T,hs)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5  # (B, T, hs) @ (B, hs, T) -> (B, T, T)
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = F.softmax(wei, dim=-1)
        wei = self.dropout(wei)
        return wei @ self.value(x)


class ListOfHeads(nn.Module):
    """A module a head, in a comprehension."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([Head() for _ in range(HEADS)])
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.proj(torch.cat([h(x) for h in self.heads], dim=-1))


class LoopOverHeads(nn.Module):
    """The loop stands in the forward itself: one source, a site a turn."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.ModuleList(nn.Linear(WIDTH, SIZE) for _ in range(HEADS)) for _ in range(3))
        self.wo = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        outs = []
        for wq, wk, wv in zip(self.wq, self.wk, self.wv, strict=True):
            q, k, v = wq(x), wk(x), wv(x)
            scores = torch.bmm(q, k.transpose(1, 2)) / SIZE**0.5
            outs.append(torch.bmm(F.softmax(scores, dim=-1), v))
        return self.wo(torch.cat(outs, dim=-1))


class DecayingLoop(Attention):
    """Each head has another scale, and looks at the head before."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        outs, last = [], 0.0
        for h in range(HEADS):
            att = (q[:, h] @ k[:, h].transpose(-2, -1)) * SIZE**-0.5 * (0.9**h) + last
            att = att.softmax(dim=-1)
            last = 0.1 * att
            outs.append(att @ v[:, h])
        return self.merge(torch.stack(outs, dim=1))


CALLS = 0
LOG = {}


class ChangesGlobal(Attention):
    def forward(self, x):
        global CALLS
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        CALLS += 1
        LOG["calls"] = CALLS
        att = F.softmax(att, dim=-1)
        return self.merge(att @ v)


class CountsInBuffer(Attention):
    """A step counter in the middle: it must go on counting."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        self.steps.add_(1)
        att = F.softmax(att, dim=-1)
        return self.merge(att @ v)


class DrawsBetween(Attention):
    """Random numbers are drawn in the middle: the stream must stay as it is."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        noise = 0.1 * torch.randn_like(v)
        att = F.softmax(att, dim=-1)
        return self.merge(att @ (v + noise))


class Walrus(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        y = (att := F.softmax((s := q @ k.transpose(-2, -1)) * s.size(-1) ** -0.5, dim=-1)) @ v
        return self.merge(y * (1.0 if att.dim() == 4 else 0.0))


class Comprehension(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        y = [
            [F.softmax(qh @ kh.t() * SIZE**-0.5, dim=-1) @ vh for qh, kh, vh in zip(qb, kb, vb, strict=True)]
            for qb, kb, vb in zip(q, k, v, strict=True)
        ]
        return self.merge(torch.stack([torch.stack(row) for row in y]))


class OneExpression(Attention):
    def forward(self, x):
        # fmt: off
        q, k, v = self.qkv(x); s = SIZE**-0.5; return self.merge((q @ k.mT * s).masked_fill(self.mask == 0, -math.inf).softmax(-1) @ v)  # noqa: E501, E702
        # fmt: on


class TryAround(Attention):
    """The pattern stands in try and with."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        try:
            with torch.autograd.set_grad_enabled(torch.is_grad_enabled()):
                att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
                att = att.softmax(dim=-1)
            y = att @ v
        except RuntimeError:
            y = v
        return self.merge(y)


class Suppressed(Attention):
    """The product stands in a block whose errors are swallowed."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        y = v
        att = ((q @ k.transpose(-2, -1)) * SIZE**-0.5).softmax(dim=-1)
        with contextlib.suppress(RuntimeError):
            y = att @ v
        return self.merge(y)


def from_closure(temperature=1.3):
    mask = torch.tril(torch.ones(TOKENS, TOKENS, dtype=torch.bool))
    slope = torch.linspace(0.1, 0.4, HEADS).view(HEADS, 1, 1)
    distance = (torch.arange(TOKENS)[None] - torch.arange(TOKENS)[:, None]).float()

    class Captured(Attention):
        def forward(self, x):
            q, k, v = self.qkv(x)
            att = (q @ k.transpose(-2, -1)) / (temperature * SIZE**0.5)
            att = att + slope * distance
            att = att.masked_fill(~mask, float("-inf"))
            return self.merge(att.softmax(dim=-1) @ v)

    return Captured(), tokens()


class Reads(Attention):
    """A name is bound in the region and read after it, by locals()."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        att = F.softmax(att, dim=-1)
        y = att @ v
        self.seen = sorted(name for name, value in locals().items() if torch.is_tensor(value) and value.dim() == 4)
        return self.merge(y * len(self.seen))


class KeepsInClosure(Attention):
    """A nested function keeps the weights alive after the forward."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = ((q @ k.transpose(-2, -1)) * SIZE**-0.5).softmax(dim=-1)

        def entropy():
            return -(att * att.clamp_min(1e-9).log()).sum(-1).mean()

        self.entropy = entropy
        return self.merge(att @ v)


class Inherited(PlainCausal):
    """The forward is the parent's, with more around it."""

    def forward(self, x):
        return super().forward(x) * 0.5


class Asserts(Attention):
    """The weights are only looked at in an assert."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = ((q @ k.transpose(-2, -1)) * SIZE**-0.5).softmax(dim=-1)
        assert att.shape == (x.size(0), HEADS, x.size(1), x.size(1))
        assert not torch.isnan(att).any(), "attention has NaN"
        return self.merge(att @ v)


def either(name, model, reason, *paths, **more):
    sites = tuple((path, "attention") for path in paths or ("",))
    return Entry(name, lambda: (model(), tokens()), sites, refused=reason, **more)


def refused(name, build, reason, **more):
    return Entry(name, build, refused=reason, **more)


def layers():
    return nn.Sequential(ByLayer(0), ByLayer(1))


ENTRIES = [
    refused("like_lambda_forward", lambda: (Around(LambdaForward()), tokens()), "lambda"),
    refused("like_exec_source", from_exec, "source"),
    refused("like_exec_source_of_another_file", from_exec_with_a_name, "source"),
    refused("like_decorated_by_wrapper", lambda: (Around(Decorated()), tokens()), "decorated"),
    refused("like_decorated_no_grad", lambda: (Around(WithoutGradient()), tokens()), "decorated"),
    refused("like_decorated_autocast", lambda: (Around(Disabled()), tokens()), "decorated"),
    refused("like_scripted", scripted, "TorchScript"),
    refused("like_forward_replaced_on_instance", replaced_on_instance, "replaced"),
    refused("like_forward_replaced_by_partial", replaced_by_partial, "replaced"),
    either("like_own_call", OwnCall, "__call__"),
    refused("like_file_changed_value", lambda: changed_on_disk("value"), "changed"),
    refused("like_file_changed_lines_moved", lambda: changed_on_disk("moved"), "changed"),
    refused("like_file_emptied", lambda: changed_on_disk("emptied"), "changed"),
    refused("like_file_gone", lambda: changed_on_disk("gone"), "source"),
    either("like_called_twice_two_manners", CalledTwice, "differ", "attn"),
    either("like_branch_on_layer_index", layers, "branch", "0", "1"),
    either("like_scale_by_step", ByStep, "scale"),
    either("like_scale_by_training", ByTraining, "scale"),
    either("like_recursion", Recursive, "differ"),
    either("like_split_over_two_functions", SplitOverTwo, "two functions"),
    refused("like_generator", lambda: (Generator(), tokens()), "generator"),
    either("like_list_of_heads", ListOfHeads, "heads", *(f"heads.{i}" for i in range(HEADS))),
    either("like_loop_over_heads", LoopOverHeads, "loop"),
    refused("like_loop_with_memory", lambda: (DecayingLoop(), tokens()), "weights"),
    either("like_global_changed_inside", ChangesGlobal, "side effect"),
    either("like_buffer_counts_inside", CountsInBuffer, "side effect"),
    either("like_random_draw_inside", DrawsBetween, "random"),
    either("like_walrus", Walrus, "assigned"),
    either("like_nested_comprehension", Comprehension, "comprehension"),
    either("like_one_line_three_statements", OneExpression, "statements"),
    either("like_try_and_with", TryAround, "try"),
    either("like_suppressed_errors", Suppressed, "with"),
    Entry("like_closure_tensors", from_closure, (("", "attention"),), refused="closure"),
    refused("like_locals_read", lambda: (Reads(), tokens()), "locals"),
    refused("like_weights_kept_in_closure", lambda: (KeepsInClosure(), tokens()), "kept"),
    either("like_forward_of_parent", Inherited, "parent"),
    refused("like_weights_asserted", lambda: (Asserts(), tokens()), "read"),
]
