"""Models written as source by a seeded generator: what people write, in many spellings, several in one model.

Every number of a pattern stands in one of the places that people keep numbers in, so that a test can change it later.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

WIDTH, HEADS, WORDS, LONGEST = 16, 2, 24, 20

HEADER = f"""import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, WORDS, LONGEST = {WIDTH}, {HEADS}, {WORDS}, {LONGEST}


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)
"""


@dataclass(frozen=True)
class Source:
    """One model.

    Attributes:
        text: defines ``Model``, whose forward takes words [batch, length] and targets of the same shape.
        numbers: by name what stands in an attribute, a global and so on; literals are not among them.
        parts: which patterns, in order.
    """

    seed: int
    text: str
    numbers: dict[str, float]
    parts: tuple[str, ...]

    def __repr__(self) -> str:
        return f"{self.seed}:{'+'.join(self.parts)}"


@dataclass
class _Part:
    """One pattern: ``body`` turns ``x`` into ``x``, ``setup`` makes what it needs of ``self``."""

    setup: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)  # text below the class
    names: list[str] = field(default_factory=list)  # assignments of the module's file


class _Writer:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.numbers: dict[str, float] = {}
        self.part, self.index = _Part(), 0

    def pick(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def often(self, share: float = 0.5) -> bool:
        return self.random.random() < share

    def begin(self) -> _Part:
        self.part, self.index = _Part(), self.index + 1
        return self.part

    def setup(self, *lines: str) -> None:
        self.part.setup.extend(lines)

    def body(self, *lines: str) -> None:
        self.part.body.extend(line for line in lines if line)

    def number(self, value: float, literal: str = "") -> str:
        """An expression for ``value``: a literal in one of three, else something that may be changed later."""
        text = literal or repr(value)
        kind = self.pick("literal", "literal", "self", "self", "global", "config", "dict", "property", "local", "class")
        if kind == "literal":
            return text
        name = f"n{len(self.numbers)}"
        self.numbers[name] = value
        if kind == "global":
            self.part.names.append(f"{name} = {text}")
            return name
        if kind == "config":
            self.setup(f"self.config_{name} = SimpleNamespace({name}={text})")
            return f"self.config_{name}.{name}"
        if kind == "dict":
            self.setup(f"self.dict_{name} = {{'{name}': {text}}}")
            return f"self.dict_{name}['{name}']"
        if kind == "property":
            self.setup(f"self.{name} = {text}")
            self.part.methods.append(f"@property\ndef get_{name}(self):\n    return self.{name}")
            return f"self.get_{name}"
        if kind == "class":
            self.part.methods.append(f"{name} = {text}")
            return f"self.{name}"
        self.setup(f"self.{name} = {text}")
        if kind == "local":
            self.body(f"{name} = self.{name}")
            return name
        return f"self.{name}"


# --------------------------------------------------------------------------------------------------------------------
# Patterns
# --------------------------------------------------------------------------------------------------------------------


def _heads(w: _Writer) -> tuple[str, str, str]:
    """Projections and heads."""
    i = w.index
    way = w.pick("three", "three", "split", "chunk", "unbind", "third", "folded", "einsum")
    bias = w.pick("True", "False")
    w.body("b, t, c = x.shape")
    heads = w.number(HEADS, "HEADS") if w.often(0.3) else "HEADS"
    if way in {"three", "folded", "einsum"}:
        w.setup(*(f"self.{n}{i} = nn.Linear(WIDTH, WIDTH, bias={bias})" for n in "qkv"))
        shape = {"three": "", "folded": f".reshape(b * {heads}, t, c // {heads})", "einsum": ""}[way]
        for n in "qkv":
            view = w.pick(
                f".view(b, t, {heads}, c // {heads})", f".reshape(b, t, {heads}, -1)", f".unflatten(-1, ({heads}, -1))"
            )
            move = w.pick(".transpose(1, 2)", ".permute(0, 2, 1, 3)", ".swapaxes(1, 2)")
            w.body(f"{n} = self.{n}{i}(x){view}{move}{shape}")
        return "q", "k", "v"
    w.setup(f"self.qkv{i} = nn.Linear(WIDTH, 3 * WIDTH, bias={bias})")
    if way == "split":
        w.body(f"q, k, v = self.qkv{i}(x).split({w.pick('c', 'WIDTH', 'x.size(-1)')}, dim=2)")
        w.body(*(f"{n} = {n}.view(b, t, {heads}, c // {heads}).transpose(1, 2)" for n in "qkv"))
    elif way == "chunk":
        w.body(f"q, k, v = self.qkv{i}(x).chunk(3, dim=-1)")
        w.body(f"q, k, v = (each.view(b, t, {heads}, c // {heads}).transpose(1, 2) for each in (q, k, v))")
    elif way == "unbind":
        w.body(f"q, k, v = self.qkv{i}(x).view(b, t, 3, {heads}, c // {heads}).permute(2, 0, 3, 1, 4).unbind(0)")
    else:
        w.body(f"qkv = self.qkv{i}(x).reshape(b, t, 3, {heads}, -1)", "q, k, v = qkv.transpose(1, 3).unbind(2)")
    return "q", "k", "v"


def _rope_tables(w: _Writer) -> None:
    i = w.index
    base = w.number(10000.0)
    half = "WIDTH // HEADS // 2"
    if w.often():
        w.setup(
            f"freq = 1.0 / 10000.0 ** (torch.arange({half}).float() / ({half}))",
            "angle = torch.outer(torch.arange(LONGEST).float(), freq)",
            "angle = torch.cat((angle, angle), dim=-1)",
            f"self.register_buffer('cos{i}', angle.cos())",
            f"self.register_buffer('sin{i}', angle.sin())",
        )
        w.body(f"cos, sin = self.cos{i}[:t], self.sin{i}[:t]")
    else:
        w.body(
            f"freq = 1.0 / {base} ** (torch.arange({half}, device=x.device).to(x.dtype) / ({half}))",
            "angle = torch.outer(torch.arange(t, device=x.device).to(x.dtype), freq)",
            "angle = torch.cat((angle, angle), dim=-1)",
            "cos, sin = angle.cos(), angle.sin()",
        )


def _rotate(w: _Writer, each: str) -> str:
    return w.pick(
        f"{each} = {each} * cos + rotate_half({each}) * sin",
        f"half = {each}.shape[-1] // 2\n"
        f"{each} = ({each} * cos) + (torch.cat((-{each}[..., half:], {each}[..., :half]), dim=-1) * sin)",
    )


def _mask(w: _Writer, s: str) -> None:
    """Lines that hide scores ``s``."""
    i = w.index
    fill = w.pick(
        'float("-inf")',
        "-torch.inf",
        "-1e9",
        f"torch.finfo({s}.dtype).min",
        w.number(-math.inf, '-float("inf")'),
        w.number(-1e9),
    )
    diagonal = w.number(1) if w.often(0.3) else "1"
    kind = w.pick(
        "none",
        "tril",
        "bool",
        "future",
        "made",
        "made triu",
        "added",
        "arange",
        "flag",
        "window",
        "1-d",
        "key",
        "where",
    )
    if kind == "none":
        return
    if kind == "tril":
        w.setup(f"self.register_buffer('seen{i}', torch.tril(torch.ones(LONGEST, LONGEST)))")
        w.body(f"{s} = {s}.masked_fill(self.seen{i}[:t, :t] == 0, {fill})")
    elif kind == "bool":
        w.setup(
            f"self.register_buffer('hidden{i}', torch.triu(torch.ones(LONGEST, LONGEST), 1).bool(), persistent=False)"
        )
        w.body(f"{s} = {s}.masked_fill(self.hidden{i}[:t, :t], {fill})")
    elif kind == "future":
        w.setup(f"self.register_buffer('future{i}', torch.full((LONGEST, LONGEST), float('-inf')).triu(1))")
        w.body(f"{s} = {s} + self.future{i}[:t, :t]")
    elif kind == "made":
        w.body(f"{s} = {s}.masked_fill(torch.tril(torch.ones(t, t, device=x.device)) == 0, {fill})")
    elif kind == "made triu":
        w.body(f"{s}.masked_fill_(torch.triu(torch.ones(t, t, dtype=torch.bool), {diagonal}), {fill})")
    elif kind == "added":
        w.setup(f"self.bias{i} = nn.Parameter(torch.randn(HEADS, LONGEST, LONGEST))")
        w.body(f"{s} = {s} + self.bias{i}[:, :t, :t]" if s == "scores" else "")
    elif kind == "arange":
        w.body("at = torch.arange(t)", f"{s} = {s}.masked_fill(at[None, :] > at[:, None], {fill})")
    elif kind == "flag":
        w.setup(f"self.flag{i} = True", f"self.register_buffer('seen{i}', torch.tril(torch.ones(LONGEST, LONGEST)))")
        w.body(f"if self.flag{i}:", f"    {s} = {s}.masked_fill(self.seen{i}[:t, :t] == 0, {fill})")
    elif kind == "window":
        size = w.number(LONGEST)
        w.body("at = torch.arange(t)", "gap = at[:, None] - at[None, :]")
        w.body(f"{s} = {s}.masked_fill((gap < 0) | (gap >= {size}), {fill})")
    elif kind == "where":
        w.setup(f"self.register_buffer('seen{i}', torch.tril(torch.ones(LONGEST, LONGEST)).bool())")
        w.body(f"{s} = torch.where(self.seen{i}[:t, :t], {s}, {fill})")
    else:
        w.setup(f"self.register_buffer('keys{i}', (torch.arange(LONGEST) % 5 != 3))")
        index = "" if kind == "1-d" else "[None, None]"
        w.body(f"{s} = {s}.masked_fill(~self.keys{i}[:t]{index if s == 'scores' else ''}, {fill})")


def _attention(w: _Writer) -> None:
    i = w.index
    q, k, v = _heads(w)
    folded = "b *" in w.part.body[-1]
    if not folded and w.often(0.3):
        _rope_tables(w)
        w.body(_rotate(w, q), _rotate(w, k))
    s = "scores" if not folded else "dots"
    share = w.number(0.0)
    scale = w.number((WIDTH // HEADS) ** -0.5)
    if w.often(0.25):
        causal = w.pick("True", "True", f"self.causal{i}")
        w.setup(f"self.causal{i} = True")
        w.body(
            f"y = F.scaled_dot_product_attention({q}, {k}, {v}, dropout_p={share} if self.training else 0.0, "
            f"is_causal={causal}{w.pick('', f', scale={scale}')})"
        )
    else:
        before = w.pick(
            "", "", f"{q} = {q} * {scale}", f"{k} = {k} / {w.number(2.0)}", f"{q} *= {scale}" if False else ""
        )
        w.body(before)
        products = [f"{q} @ {k}.transpose(-2, -1)", f"torch.matmul({q}, {k}.mT)"]
        products += (
            [f"torch.bmm({q}, {k}.transpose(1, 2))"] if folded else [f"torch.einsum('bhid,bhjd->bhij', {q}, {k})"]
        )
        w.body(f"{s} = {w.pick(*products)}")
        w.body(
            w.pick(
                "",
                f"{s} = {s} * {scale}",
                f"{s} = {s} / math.sqrt({q}.size(-1))",
                f"{s} = {s} / {w.number(2.5)}",
                f"{s} *= {scale}",
                f"{s} = {s} * (1.0 / math.sqrt({w.number(WIDTH / HEADS)}))",
            )
        )
        cap = w.number(5.0) if w.often(0.1) else ""
        w.body(f"{s} = {cap} * torch.tanh({s} / {cap})" if cap else "")
        _mask(w, s)
        soft = w.pick(
            f"F.softmax({s}, dim=-1)",
            f"{s}.softmax(-1)",
            f"torch.softmax({s}, dim={w.number(-1)})",
            f"F.softmax({s}, dim=-1, dtype={s}.dtype)",
        )
        w.body(f"att = {soft}")
        w.setup(f"self.drop{i} = nn.Dropout(0.0)")
        w.body(
            w.pick(
                "",
                f"att = self.drop{i}(att)",
                f"att = F.dropout(att, p={share}, training=self.training)",
                f"if self.training:\n    att = self.drop{i}(att)",
            )
        )
        w.body(f"y = {w.pick('att @ v', 'torch.matmul(att, v)', 'att.matmul(v)')}")
    if folded:
        w.body("y = y.view(b, HEADS, t, c // HEADS)")
    w.body(
        w.pick(
            "y = y.transpose(1, 2).contiguous().view(b, t, c)",
            "y = y.transpose(1, 2).reshape(b, t, c)",
            "y = y.permute(0, 2, 1, 3).flatten(2)",
        )
    )
    w.setup(f"self.out{i} = nn.Linear(WIDTH, WIDTH)")
    w.body(f"x = {w.pick('x + ', '')}self.out{i}(y)")


def _gelu(w: _Writer) -> None:
    i = w.index
    w.setup(f"self.up{i} = nn.Linear(WIDTH, 2 * WIDTH)", f"self.down{i} = nn.Linear(2 * WIDTH, WIDTH)")
    w.body(f"h = self.up{i}(x)")
    way = w.pick("erf", "tanh", "tanh cube", "sqrt", "quick", "torch", "module")
    half, one = w.number(0.5), w.number(1.0)
    if way == "erf":
        w.body(f"h = {half} * h * ({one} + torch.erf(h / {w.number(math.sqrt(2.0), 'math.sqrt(2.0)')}))")
    elif way == "sqrt":
        w.body(f"h = h * {half} * ({one} + torch.erf(h * {w.number(2**-0.5, '0.7071067811865476')}))")
    elif way == "quick":
        w.body(f"h = h * torch.sigmoid({w.number(1.702)} * h)")
    elif way == "torch":
        w.setup(f"self.way{i} = 'tanh'")
        w.body(f"h = F.gelu(h, approximate={w.pick(repr('none'), repr('tanh'), f'self.way{i}')})")
    elif way == "module":
        w.setup(f"self.act{i} = nn.GELU({w.pick('', repr('tanh'))})")
        w.body(f"h = self.act{i}(h)")
    else:
        cube = "h * h * h" if way == "tanh cube" else f"torch.pow(h, {w.number(3.0)})"
        root = w.number(math.sqrt(2 / math.pi), "math.sqrt(2.0 / math.pi)")
        w.body(f"h = {half} * h * ({one} + torch.tanh({root} * (h + {w.number(0.044715)} * {cube})))")
    w.body(f"x = {w.pick('x + ', '')}self.down{i}(h)")


def _norm(w: _Writer) -> None:
    i = w.index
    way = w.pick(
        "rms",
        "rms",
        "rms sum",
        "layer",
        "layer var",
        "torch rms",
        "torch layer",
        "add",
        "add rms",
        "add drop",
        "functional",
    )
    w.setup(f"self.g{i} = nn.Parameter(torch.rand(WIDTH) + 0.5)", f"self.b{i} = nn.Parameter(torch.randn(WIDTH))")
    eps, power = w.number(1e-5), w.number(2)
    w.setup(f"self.lin{i} = nn.Linear(WIDTH, WIDTH)")
    w.body(f"h = self.lin{i}(x)")
    if way.startswith("add"):
        share = w.number(0.0)
        w.setup(f"self.ln{i} = nn.LayerNorm(WIDTH)", f"self.rn{i} = nn.RMSNorm(WIDTH)", f"self.dr{i} = nn.Dropout(0.0)")
        branch = w.pick(f"self.dr{i}(h)", f"F.dropout(h, {share}, self.training)") if way == "add drop" else "h"
        factor = w.pick("", "", f"{w.number(0.5)} * ")
        w.body(f"x = x + {factor}{branch}", f"x = x + self.{'rn' if way == 'add rms' else 'ln'}{i}(x)")
        return
    if way == "rms":
        mean = w.pick(
            f"h.pow({power}).mean(-1, keepdim=True)",
            "(h * h).mean(dim=-1, keepdim=True)",
            f"(h**{power}).mean(-1, True)",
        )
        w.body(
            w.pick(
                f"h = h * torch.rsqrt({mean} + {eps})",
                f"h = h / torch.sqrt({mean} + {eps})",
                f"h = h * ({mean} + {eps}) ** {w.number(-0.5)}",
            )
        )
        w.body(w.pick(f"h = h * self.g{i}", f"h = self.g{i} * h", f"h = h * ({w.number(1.0)} + self.g{i})"))
    elif way == "rms sum":
        w.body(
            f"h = h * torch.rsqrt(h.pow({power}).sum(-1, keepdim=True) / {w.number(float(WIDTH))} + {eps}) * self.g{i}"
        )
    elif way in {"layer", "layer var"}:
        w.body("m = h.mean(-1, keepdim=True)")
        unbiased = w.pick("False", f"self.unbiased{i}")
        w.setup(f"self.unbiased{i} = False")
        var = (
            f"h.var(-1, keepdim=True, unbiased={unbiased})"
            if way == "layer var"
            else f"(h - m).pow({power}).mean(-1, keepdim=True)"
        )
        w.body(f"s2 = {var}", f"h = self.g{i} * (h - m) / torch.sqrt(s2 + {eps}) + self.b{i}")
    elif way == "functional":
        w.body(f"h = F.layer_norm(h, (WIDTH,), self.g{i}, self.b{i}, {eps})")
    elif way == "torch rms":
        w.body(f"h = F.rms_norm(h, (h.size(-1),), self.g{i}, {eps})")
    else:
        w.setup(f"self.ln{i} = nn.LayerNorm(WIDTH)")
        w.body(f"h = self.ln{i}(h)")
    w.body("x = x + h")


def _swiglu(w: _Writer) -> None:
    i = w.index
    w.setup(f"self.w1{i} = nn.Linear(WIDTH, 2 * WIDTH)", f"self.w3{i} = nn.Linear(WIDTH, 2 * WIDTH)")
    w.setup(f"self.w2{i} = nn.Linear(2 * WIDTH, WIDTH)", f"self.w13{i} = nn.Linear(WIDTH, 4 * WIDTH)")
    if w.often():
        w.body(f"a, g = self.w1{i}(x), self.w3{i}(x)")
    else:
        w.body(f"a, g = self.w13{i}(x).{w.pick('chunk(2, dim=-1)', 'split(2 * WIDTH, -1)', 'tensor_split(2, -1)')}")
    gate = w.pick(
        "F.silu(a)",
        "a * torch.sigmoid(a)",
        f"a * torch.sigmoid({w.number(1.0)} * a)",
        "a.sigmoid() * a",
        f"a / ({w.number(1.0)} + torch.exp(-a))",
    )
    w.body(f"h = {w.pick(f'{gate} * g', f'g * ({gate})')}", f"x = {w.pick('x + ', '')}self.w2{i}(h)")


def _dropout(w: _Writer) -> None:
    i = w.index
    w.setup(f"self.dr{i} = nn.Dropout(0.0)")
    w.body(w.pick(f"x = self.dr{i}(x)", f"x = F.dropout(x, {w.number(0.0)}, training=self.training)"))


_PATTERNS: dict[str, Callable[[_Writer], None]] = {
    "attention": _attention,
    "gelu": _gelu,
    "norm": _norm,
    "swiglu": _swiglu,
    "dropout": _dropout,
}


def _loss(w: _Writer) -> str:
    """Lines from x and targets to what is returned."""
    way = w.pick("none", "ce", "ce", "ce flat", "by hand", "nll", "tied", "smooth", "weights", "transposed")
    if way == "none":
        w.body(w.pick("return x", "return x, x.mean()", "return {'last_hidden_state': x}"))
        return way
    w.setup(
        "self.head = nn.Linear(WIDTH, WORDS, bias=False)"
        if way == "tied" or w.often()
        else "self.head = nn.Linear(WIDTH, WORDS)"
    )
    if way == "tied":
        w.setup("self.head.weight = self.table.weight")
    factor = w.pick("", "", f" * {w.number(0.7)}", f" / {w.number(1.5)}")
    w.body(f"logits = self.head(x){factor}")
    if w.often(0.15):
        cap = w.number(6.0)
        w.body(f"logits = {cap} * torch.tanh(logits / {cap})")
    flat = w.pick("logits.view(-1, logits.size(-1)), targets.view(-1)", "logits.flatten(0, 1), targets.flatten()")
    if way in {"ce", "tied"}:
        ignore = w.number(-1) if w.often() else "-1"
        w.body(f"loss = F.cross_entropy({flat}, ignore_index={ignore}{w.pick('', ', reduction=' + repr('mean'))})")
    elif way == "ce flat":
        w.setup("self.criterion = nn.CrossEntropyLoss()")
        w.body(f"loss = self.criterion({flat})")
    elif way == "smooth":
        w.body(f"loss = F.cross_entropy({flat}, label_smoothing={w.number(0.1)})")
    elif way == "weights":
        w.setup("self.register_buffer('share', torch.rand(WORDS) + 0.5)")
        w.body(f"loss = F.cross_entropy({flat}, self.share, reduction={w.pick(repr('sum'), repr('mean'))})")
    elif way == "transposed":
        w.body("loss = F.cross_entropy(logits.transpose(1, 2), targets)")
    elif way == "nll":
        w.body("logp = F.log_softmax(logits, dim=-1)", "loss = F.nll_loss(logp.flatten(0, 1), targets.flatten())")
    else:
        w.body(
            "logp = logits - logits.logsumexp(-1, keepdim=True)",
            "loss = -logp.gather(-1, targets.unsqueeze(-1)).mean()",
        )
    if w.often(0.3):
        w.body(f"loss = loss * {w.number(1.0)}")
    w.body(
        w.pick("return logits, loss", "return logits, loss", "return {'loss': loss, 'logits': logits}", "return loss")
    )
    return way


# --------------------------------------------------------------------------------------------------------------------
# Classes around them
# --------------------------------------------------------------------------------------------------------------------


def _indented(lines: list[str], depth: int) -> str:
    return "\n".join(" " * depth + line for text in lines for line in text.split("\n"))


def _class(name: str, part: _Part, signature: str, tail: str = "") -> str:
    body = [*part.body, *([tail] if tail else [])]
    text = (
        f"class {name}(nn.Module):\n    def __init__(self):\n        super().__init__()\n{_indented(part.setup, 8)}\n"
    )
    text += f"\n    def forward({signature}):\n{_indented(body, 8)}\n"
    for method in part.methods:
        text += f"\n{_indented([method], 4)}\n"
    return "\n".join(part.names) + "\n\n\n" + text


def source(seed: int) -> Source:
    """The model of a seed."""
    w = _Writer(seed)
    kinds = [w.pick(*_PATTERNS, "attention") for _ in range(w.pick(1, 2, 2, 3))]
    texts, root = [], _Part()
    root.setup += ["self.table = nn.Embedding(WORDS, WIDTH)"]
    root.body += [w.pick("x = self.table(words)", "x = F.embedding(words, self.table.weight)")]
    for at, kind in enumerate(kinds):
        part = w.begin()
        _PATTERNS[kind](w)
        style = w.pick("inline", "class", "class", "loop", "function", "method", "sequential", "parent")
        if not part.setup:
            part.setup.append("pass")
        if style == "inline":
            root.setup += part.setup
            root.body += part.body
            root.methods += part.methods
            root.names += part.names
        elif style == "function":
            text = f"def part_{at}(layer, x):\n{_indented(part.body, 4)}\n    return x\n"
            root.names += [*part.names, "\n\n" + text.replace("self.", "layer.")]
            root.setup += part.setup
            root.methods += part.methods
            root.body.append(f"x = part_{at}(self, x)")
        elif style == "method":
            root.names += part.names
            root.setup += part.setup
            root.methods += [*part.methods, f"def part_{at}(self, x):\n{_indented(part.body, 4)}\n    return x"]
            root.body.append(f"x = self.part_{at}(x)")
        else:
            base = _class(f"Part{at}", part, "self, x", w.pick("return x", "return x", "result = x\nreturn result"))
            texts.append(base)
            if style == "parent":
                texts.append(
                    f"class Child{at}(Part{at}):\n    def forward(self, x):\n        return super().forward(x) + x\n"
                )
                root.setup.append(f"self.part{at} = Child{at}()")
                root.body.append(f"x = self.part{at}(x)")
            elif style == "class":
                root.setup.append(f"self.part{at} = Part{at}()")
                root.body.append(f"x = self.part{at}(x)")
            elif style == "loop":
                root.setup.append(f"self.part{at} = nn.ModuleList(Part{at}() for _ in range(2))")
                root.body += [f"for block in self.part{at}:", "    x = block(x)"]
            else:
                root.setup.append(f"self.part{at} = nn.Sequential(Part{at}(), nn.LayerNorm(WIDTH), Part{at}())")
                root.body.append(f"x = self.part{at}(x)")
    w.part = root
    w.index = 0
    loss = _loss(w)
    texts.append(_class("Model", root, "self, words, targets=None"))
    return Source(seed, HEADER + "\n\n" + "\n\n".join(texts), dict(w.numbers), (*kinds, loss))
