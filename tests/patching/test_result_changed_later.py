"""What attention gives is changed in place, on a path that the recorded step did not take, or behind the module."""

from __future__ import annotations

import copy
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gradscope.patching.patches import Patches
from gradscope.patching.plan import plan
from gradscope.workload import Workload
from tests.patching import spelled

ATTENTION = """
q, k, v = self.norm(x).unflatten(-1, (4, 6)).transpose(1, 2), u.unflatten(-1, (4, 6)).transpose(1, 2), None
v = k + 1
a = (q @ k.transpose(-2, -1) * 0.25).softmax(-1)
y = (a @ v).transpose(1, 2).reshape(x.shape)
"""
CHANGED = {
    "by an operator": "if self.flag:\n    y *= 2",
    "by an index": "if self.flag:\n    y[:, 0] = 0",
    "by an index of several": "if self.flag:\n    y[:, 0], z = 0, 1",
    "by an index in a loop": "if self.flag:\n    for y[:, 0, 0] in (torch.zeros(()),):\n        pass",
    "in a list": "z = [y]\nif self.flag:\n    for each in z:\n        each += 1",
    "by an argument in its place": "y = F.relu(y, self.flag)",
    "where it is made": "y = F.relu((a @ v).transpose(1, 2).reshape(x.shape), self.flag)",
    "by the last argument": "y = F.dropout(y, 0.0, True, self.flag) if self.flag else y",
    "by a method": "if self.flag:\n    y.mul_(2)",
    "by a view's method": "if self.flag:\n    y.view(-1)[:3].zero_()",
    "by a function": "if self.flag:\n    y = torch.relu_(y)",
    "by an argument": "if self.flag:\n    y = F.relu(y, inplace=True)",
    "as what a call writes to": "if self.flag:\n    with torch.no_grad():\n        torch.mul(x, 2, out=y)",
    "by a view of the class": "if self.flag:\n    torch.Tensor.mul_(y.view(-1), 2)",
    "under a cast that was a copy": "z = y.double()\nif self.flag:\n    z += 1\ny = y + z.to(y.dtype)",
    "under another name": "z = y.flatten(1)\nif self.flag:\n    z += 1",
    "of either branch": "z = y if self.flag else self.out(y)\nz += 1\ny = y + z",
    "in every step": "y += x",
    "through many names": "if self.flag:\n    z0 = y\n"
    + "".join(f"    z{each + 1} = z{each}\n" for each in range(30))
    + "    z30 += 1",
    "in a loop": "for _ in range(2):\n    y = y.contiguous()\n    if self.flag:\n        y.add_(1)",
}
CHANGED |= {
    f"behind autograd's back, {name}": code
    for name, code in {
        "its data": "z = y.data\nif self.flag:\n    z.mul_(2)",
        "as an array": "z = y.detach().numpy()\nif self.flag:\n    z[:] = 0",
        "in pairs": "for z, w in zip(y, x):\n    if self.flag:\n        z.data.mul_(2)",
        "in a comprehension": "if self.flag:\n    [each.data.mul_(2) for each in y]",
        "by operator.setitem": "import operator\nif self.flag:\n    operator.setitem(y.data, 0, 0)",
        "by its own setitem": "if self.flag:\n    y.data.__setitem__(0, 0)",
        "as an attribute": "self.kept = y\nif self.flag:\n    self.kept.data.mul_(2)",
        "in a list": "z = []\nz.append(y)\nif self.flag:\n    z[0].data += 1",
    }.items()
}
CHANGED |= {
    "as an attribute": "self.kept = y\nif self.flag:\n    self.kept *= 2",
    "by a function of its own": "def double(z):\n    z *= 2\n    return z\nif self.flag:\n    y = double(y)",
    "by a keyword of one": "def fill(z, *, of):\n    of[:, 0] = 0\nif self.flag:\n    fill(x, of=y)",
    "an item of a list": "z = []\nz.append(y)\nif self.flag:\n    z[0] += 1",
    "by operator.imul": "import operator\nif self.flag:\n    y = operator.imul(y, 2)",
    "by its own imul": "if self.flag:\n    y.__imul__(2)",
}
APART = {
    "an attribute that holds another": "self.kept = x * 1\nif self.flag:\n    self.kept *= 2\ny = y + self.kept",
    "by a function, another": "def double(z, w):\n    w *= 2\n    return z\nif self.flag:\n    y = double(y, x * 1)",
    "what a comprehension makes": "z = [each.mul_(2) for each in [y * 1]]\ny = y + z[0]",
    "what a layer made of it": "y = self.out(y)\ny += x",
    "under a condition": "y = self.out(y)\nif self.flag:\n    y *= 2",
    "a copy": "z = y * 1\nz += 1\ny = y + z",
    "whether it is above a number": "if self.flag:\n    z = y > 0\n    z &= x > 0\n    y = y * z\ny = self.out(y)",
    "no content": "y.requires_grad_()\ny = self.out(y)",
    "by a method of an operator's": "y = y.__mul__(2.0)",
    "the same name before": "y = self.out(y)\nfor _ in range(2):\n    y += x",
}


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


def patched(folder: Path, behind: str) -> tuple[nn.Module, nn.Module, Patches]:
    model = spelled.entry(folder, ATTENTION.strip() + "\n" + behind, "changed").build()[0]
    original = copy.deepcopy(model)
    found = plan(Workload(model, torch.randn(2, 5, spelled.WIDTH)), recipes=["attention"])
    return model, original, Patches(found)


@pytest.mark.parametrize("behind", [*CHANGED.values(), *APART.values()], ids=[*CHANGED, *APART])
def test_the_step_runs_whatever_the_flag_and_the_length(tmp_path: Path, behind: str) -> None:
    model, original, patches = patched(tmp_path, behind)
    patches.apply()
    for each in (model, original):
        each.double()
    for flag in (False, True):
        for length in (5, 1, 40):
            model.flag = original.flag = flag
            x = torch.randn(2, length, spelled.WIDTH, dtype=torch.float64)
            for new, old in zip(step(model, x), step(original, x), strict=True):
                torch.testing.assert_close(new, old, rtol=1e-9, atol=1e-9)  # sums of some hundred numbers
    patches.revert()


@pytest.mark.parametrize("behind", APART.values(), ids=APART)
def test_other_tensors_may_be_changed(tmp_path: Path, behind: str) -> None:
    assert patched(tmp_path, behind)[2].kept


def test_dropout_returns_the_result_itself_in_evaluation(tmp_path: Path) -> None:
    model, original, patches = patched(tmp_path, "z = self.drop(y)\nif self.flag:\n    z += 1\ny = y + z")
    patches.apply()
    x = torch.randn(2, 5, spelled.WIDTH, dtype=torch.float64)
    for each in (model, original):
        each.double().eval()
        each.flag = True
    for new, old in zip(step(model, x), step(original, x), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-9, atol=1e-9)  # sums of some hundred numbers
    patches.revert()


LOOPED = f"""
y, total = x * 1, x
for _ in range(2):
    BEFORE
    if self.flag:
        y.mul_(2)
{textwrap.indent(ATTENTION.strip(), "    ")}
    total = total + y
y = total
"""


@pytest.mark.parametrize(("before", "is_left"), [("pass", True), ("y = x * 1", False)])
def test_above_it_in_the_loop_that_it_stands_in(tmp_path: Path, before: str, is_left: bool) -> None:
    """In the next round: by then it is there, unless its name holds something else by then."""
    model = spelled.entry(tmp_path, LOOPED.replace("BEFORE", before), "looped").build()[0].double()
    original = copy.deepcopy(model)
    x = torch.randn(2, 5, spelled.WIDTH, dtype=torch.float64)
    patches = Patches(plan(Workload(model, x), recipes=["attention"]))
    assert (not patches.kept) is is_left
    patches.apply()
    model.flag = original.flag = True
    for new, old in zip(step(model, x), step(original, x), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-9, atol=1e-9)  # sums of some hundred numbers
    patches.revert()


class Packed(nn.Module):
    """Attention to what one layer gives, changed in place on a path that is not taken."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.flag = nn.Linear(24, 72), nn.Linear(24, 24), False

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        q, k, v = self.qkv(x).view(samples, tokens, 3, 4, 6).permute(2, 0, 3, 1, 4)
        y = (q @ k.transpose(-2, -1) * 0.25).softmax(-1) @ v
        y = y.transpose(1, 2).reshape(samples, tokens, width)
        if self.flag:
            y *= 2
        return torch.as_tensor(self.out(y))


def test_of_packed_queries_keys_and_values() -> None:
    found = plan(Workload(Packed(), torch.randn(2, 5, 24)), recipes=["packed_attention"])
    assert [site.recipe for site in found.sites if "in place" in site.why_not] == ["packed_attention"], found.sites


class Inner(nn.Module):
    """Attention whose heads come back as they are."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor((x @ x.transpose(-2, -1) * 0.25).softmax(-1) @ x)


class Around(nn.Module):
    """Changes in place what a module below gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner, self.out = nn.Linear(6, 6), Inner(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.up(x))
        y += x
        return torch.as_tensor(self.out(y))


def test_changed_by_the_module_around() -> None:
    found = plan(Workload(Around(), torch.randn(2, 4, 5, 6)), recipes=["attention"])
    assert [site.path for site in found.sites if "in place" in site.why_not] == ["inner"]


class Acted(nn.Module):
    """An activation behind attention, that its class makes in place or not."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.qkv, self.act = nn.Linear(24, 72), nn.ReLU(inplace)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4)
        return self.act((q @ k.mT * 0.25).softmax(-1) @ v).transpose(1, 2)


class NeverInPlace(Acted):
    def __init__(self) -> None:
        super().__init__(False)
        self.soft = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4)
        return self.soft((q @ k.mT * 0.25).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize(("model", "count"), [(Acted(False), 0), (NeverInPlace(), 1)])
def test_a_module_that_another_instance_has_in_place(model: nn.Module, count: int) -> None:
    assert len(plan(Workload(model, torch.randn(2, 5, 24)), recipes=["attention"]).supported) == count
