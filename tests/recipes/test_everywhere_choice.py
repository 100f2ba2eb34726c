"""Which code runs for a recipe where torch code runs: the documented table, and what ``explain`` says."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.tensor import Replicate
from torch.fx.experimental.proxy_tensor import make_fx

from gradscope import recipes
from gradscope.kernels import plain
from gradscope.kernels.plain import why_torch

from .everywhere import CASES, Case
from .everywhere_checks import (
    FUNCTIONS,
    TORCHS_WARNINGS,
    Called,
    Function,
    Named,
    Seen,
    of_a_mesh,
    total,
)

pytestmark = TORCHS_WARNINGS


def test_meta_beside_others_is_an_error_that_the_recipe_names() -> None:
    real, meta = torch.ones(2), torch.ones(2, device="meta")
    for given in ((meta, 1.0), (meta, (meta, None)), ((meta,), meta)):
        assert why_torch(given) == "the tensors are on the meta device"
    for given in ((meta, real), (meta, (real,)), (real, (meta,)), ((meta,), (real,))):
        assert why_torch(given) is None


EXPLAINED = [name for name in FUNCTIONS if hasattr(getattr(recipes, name), "explain")]


def test_explain_says_why() -> None:
    x = torch.randn(4, 6)
    choice = recipes.swiglu.explain(x.to("meta"))
    assert str(choice) == (
        "torch: torch's operations, for the tensors are on the meta device\n"
        "not triton: the tensors are on the meta device\n"
        "not cpu: the tensors are on the meta device"
    )
    assert recipes.swiglu.explain(x.as_subclass(Named)).refused["cpu"] == "a tensor is a Named"
    assert recipes.swiglu.explain(x, up=x.as_subclass(Named)).refused["cpu"] == "a tensor is a Named"
    assert recipes.swiglu.explain(x.to_sparse()).refused["cpu"] == "a tensor's layout is sparse_coo"
    with FakeTensorMode():
        assert recipes.swiglu.explain(x).refused["cpu"] == "torch is tracing, or running without data"
    with forward_ad.dual_level():
        assert recipes.swiglu.explain(x).refused["cpu"] == "forward-mode AD is active"


def test_own_code_that_is_asked_for_cannot_run() -> None:
    with pytest.raises(ValueError) as raised:
        torch.func.vmap(lambda row: recipes.swiglu(row, backend="cpu"))(torch.randn(4, 6))
    assert str(raised.value) == "swiglu: backend='cpu' cannot run here: a torch.func transform is active"
    with pytest.raises(ValueError) as raised:
        recipes.swiglu(torch.empty(4, 6, device="meta"), backend="cqu")
    assert str(raised.value) == "swiglu: backend is 'cqu'; expected 'auto' or 'triton' or 'cpu' or 'torch'"


def in_place(where: str, case: Case, mesh: Any) -> None:
    """Run a case at a place of the documented table."""
    tensors = case.tensors()
    whole = lambda *given: total(case.run(*given))  # noqa: E731
    constants = tensors[len(case.shapes) :]
    if where.startswith("torch.func"):
        torch.func.grad(lambda first: whole(first, *tensors[1:]))(tensors[0])
    elif where == "forward-mode derivatives":
        with forward_ad.dual_level():
            case.run(forward_ad.make_dual(tensors[0], tensors[0]), *tensors[1:])
    elif where == "meta tensors":
        case.run(*(each.to("meta") for each in tensors))
    elif where == "fake tensors":
        with FakeTensorMode() as mode:
            case.run(*map(mode.from_tensor, tensors))
    elif where == "make_fx":
        make_fx(lambda *given: case.run(*given))(*tensors)
    elif where == "torch.export":
        torch.export.export(Function(case.run), tensors)
    elif where == "torch.jit.trace":
        torch.jit.trace(lambda *given: case.run(*given), tensors, check_trace=False)
    elif where.startswith("DTensor"):
        case.run(*of_a_mesh(mesh, tensors, Replicate()))
    elif where == "nested tensors":
        nested = tuple(torch.nested.nested_tensor([each, each], layout=torch.jagged) for each in tensors[:1])
        with contextlib.suppress(Exception):  # torch may refuse: asked is only who was called
            case.run(*nested, *tensors[1:])
    elif where == "modes of the user's":
        with Seen(), Called():
            case.run(*tensors)
    else:
        assert where == "ordinary tensors" and len(constants) == len(case.constants)
        case.run(*tensors)


def documented() -> list[list[str]]:
    page = (Path(__file__).parents[2] / "docs" / "patching.md").read_text(encoding="utf-8")
    table = page.partition("<!-- everywhere -->\n")[2].partition("<!-- /everywhere -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("where", "runs"), documented(), ids=lambda cell: cell)
def test_the_documented_table(where: str, runs: str, mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/patching.md: what runs for each recipe at each place."""
    said: list[bool] = []

    def watched(values: Any) -> str | None:
        why = why_torch(values)
        said.append(why is not None)
        return why

    monkeypatch.setattr("gradscope.kernels.choice.why_torch", watched)
    for case in CASES:
        if case.name.startswith(("lazy_linear", "attention_with_weights")):
            continue
        said.clear()
        in_place(where, case, mesh)
        assert (any(said), case.name) == (runs == "torch's operations", case.name)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_either_layout_are_torchs() -> None:
    """The strided ones are plain by their class and their layout."""
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
        assert plain.why_torch((nested,)) is not None and plain.why_torch(((nested, nested),)) is not None
    assert plain.why_torch((torch.ones(2), (torch.ones(1), None, 3))) is None
