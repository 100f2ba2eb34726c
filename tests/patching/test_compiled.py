"""What runs under torch.compile is found and proved as without, and measured as compiled; ours is never compiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradscope
from gradscope.compat import is_compiled
from gradscope.errors import WorkloadError
from gradscope.patching.advice import what_to_do
from gradscope.patching.patches import Patches
from gradscope.patching.prove.unit import Unit
from tests.patching import small

X = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(5))
REASON = "torch.compile was applied to a function or layer in it, not to the module whose code would change"
UNGRADED = pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own, of the input that it traces
OURS = str(Path(gradscope.__file__).parent)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = small.Causal(32), small.Causal(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


class Backend:
    """Runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, given: list[Tensor]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward


class Head(nn.Module):
    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.head = torch.compile(nn.Linear(8, 50), backend=backend)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x)
        return functional.cross_entropy(logits, y)


class Activated(nn.Module):
    """A part of what its forward does is compiled by itself."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.act = torch.compile(Gelu(), backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        return x + attended(self.act(self.fc(x)))


class Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def attended(x: Tensor) -> Tensor:
    return ((x @ x.transpose(-2, -1)) * 0.25).softmax(-1) @ x


class Decorated(small.Causal):
    forward = torch.compile(small.Causal.forward, backend="eager")


class Outer(nn.Module):
    """What would be rewritten stands in a function that is compiled by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return compiled_attended(x)


compiled_attended = torch.compile(attended, backend="eager")


class Blocks(nn.Module):
    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(small.Causal(32) for _ in range(12))
        for block in self.blocks:
            block.compile(backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(name="backend")
def backend_fixture() -> Backend:
    torch.compiler.reset()
    return Backend()


def wrapped(net: Net, backend: Backend) -> None:
    net.two = torch.compile(net.two, backend=backend)


def in_place(net: Net, backend: Backend) -> None:
    net.two.compile(backend=backend)


def method(net: Net, backend: Backend) -> None:
    net.two.forward = torch.compile(net.two.forward, backend=backend)


def called_otherwise(net: Net, backend: Backend) -> None:
    """The model holds the module itself, and what was compiled of it in a list."""
    held = [torch.compile(net.two, backend=backend)]
    net.forward = lambda x: held[0](net.one(x))


@pytest.mark.parametrize("compiled", [wrapped, in_place, called_otherwise])
def test_a_compiled_part(compiled: Callable[[Net, Backend], None], backend: Backend) -> None:
    plain, net = Net(), Net()
    expected = gradscope.plan(plain, X, recipes=["attention"])
    compiled(net, backend)
    found = gradscope.plan(net, X, recipes=["attention"])
    assert [(site.path, site.reasons, site.compiled) for site in found.sites] == [("one", [], False), ("two", [], True)]
    assert Patches(found).diff == Patches(expected).diff != ""
    assert backend.graphs == []


def test_a_compiled_forward(backend: Backend) -> None:
    """A method of our own in its place would not be compiled."""
    net = Net()
    method(net, backend)
    found = Patches(gradscope.plan(net, X, recipes=["attention"]))
    assert [(site.path, site.reasons) for site in found.sites] == [("one", []), ("two", [REASON])]
    assert [site.path for site in found.kept] == ["one"] and found.in_source == [] and found.diff == ""
    assert what_to_do(REASON) == "compile the module instead: module.compile(), or torch.compile(module)"
    (site,) = gradscope.plan(Decorated(32), X, recipes=["attention"]).sites
    assert site.reasons == [REASON]


def test_a_part_below_a_module_that_is_compiled_by_itself(backend: Backend) -> None:
    model = Activated(backend)
    found = gradscope.plan(model, torch.randn(2, 12, 8), recipes=["attention", "gelu"])
    assert {site.recipe: (site.path, site.reasons) for site in found.sites} == {
        "gelu": ("act", []),
        "attention": ("", []),
    }
    (site,) = gradscope.plan(Outer(), X.clone().requires_grad_(), recipes=["attention"]).sites
    assert site.reasons == [REASON]


def test_a_compiled_model(backend: Backend) -> None:
    found = gradscope.plan(torch.compile(Net(), backend=backend), X, recipes=["attention"])
    assert [(site.path, site.reasons) for site in found.sites] == [("one", []), ("two", [])]
    assert backend.graphs == []


@UNGRADED
@pytest.mark.parametrize("whole", [True, False])
def test_the_compiled_code_is_the_new_code(whole: bool, backend: Backend) -> None:
    """Compiled before and after, and as before once it is reverted; alike blocks are one graph, as they were."""
    model: Any = Blocks(backend)
    if whole:
        model = Blocks("eager").requires_grad_()
        for block in model.blocks:
            block._compiled_call_impl = None
        model = torch.compile(model, backend=backend)
    model.eval()

    def ops() -> list[str]:
        backend.graphs.clear()
        model(X).sum().backward()
        targets = [node.target for each in backend.graphs for node in each.graph.nodes]
        return [str(getattr(target, "__name__", target)) for target in targets]

    before = ops()
    graphs = len(backend.graphs)
    assert before.count("softmax") == (12 if whole else graphs) and (whole or graphs <= 2)
    expected = model(X)
    patches = gradscope.patch(model, X, recipes=["attention"], verify=False)
    after = ops()
    assert "softmax" not in after and len(backend.graphs) == graphs
    assert [name for name in after if "_flash_attention_for_cpu" in name]
    assert torch.allclose(model(X), expected, atol=1e-5)
    patches.revert()
    assert ops() in ([], before)
    assert torch.equal(model(X), expected)


@UNGRADED
@pytest.mark.parametrize("ran_before", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_a_part_that_is_changed_afterwards_is_asked_in_compiled_code_too(
    whole: bool, ran_before: bool, backend: Backend
) -> None:
    """Of alike blocks with one graph, one gets a forward of its own on a part whose call the new code replaces."""
    model: Any = Blocks(backend).eval()
    if whole:
        for block in model.blocks:
            block._compiled_call_impl = None
        model = torch.compile(model, backend=backend)
    expected = gradscope.patch(model, X, recipes=["attention"], verify=False)
    if ran_before:
        model(X)
    model.blocks[1].drop.forward = lambda x: x * 3
    found = model(X)
    expected.revert()
    torch.compiler.reset()
    assert torch.allclose(found, model(X), atol=1e-5)


def test_alike_blocks_share_a_method(backend: Backend) -> None:
    patches = gradscope.patch(Blocks(backend), X, recipes=["attention"], verify=False)
    assert len(patches.swaps) == 12 and len({method for swap in patches.swaps for method in swap.methods.values()}) == 1


@UNGRADED
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does, of a Function
def test_a_program_that_forbids_to_compile_anew(backend: Backend) -> None:
    from torch._dynamo import config

    model = Net()
    model.compile(backend=backend)
    with config.patch(error_on_recompile=True):
        results = gradscope.patch(model, X, recipes=["attention"]).verified.results
        assert not [result.reason for result in results if "error" in result.reason] and config.error_on_recompile
    held = dict(vars(model.one))
    for stance in ("fail_on_recompile", "eager_on_recompile"):  # of the second nothing would be compiled any more
        with torch.compiler.set_stance(stance), pytest.raises(WorkloadError, match=stance):
            gradscope.patch(model, X, recipes=["attention"])
    assert vars(model.one).keys() == held.keys()


@UNGRADED
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("way", ["stance", "disable"])
def test_a_program_that_has_compiled_code_run_as_it_stands(way: str, backend: Backend) -> None:
    from torch._dynamo import config

    model = Net()
    model.compile(backend=backend)
    stopped = torch.compiler.set_stance("force_eager") if way == "stance" else config.patch(disable=True)
    with stopped:
        patches = gradscope.patch(model, X, recipes=["attention"])
    assert patches.verified is not None and not patches.verified.compiled
    assert backend.graphs == []


@UNGRADED
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does, of a Function
def test_an_error_of_the_compiler_is_no_recipes() -> None:
    def fails(graph: torch.fx.GraphModule, given: list[Tensor]) -> Any:
        raise RuntimeError("out of luck")

    torch.compiler.reset()
    model = Net()
    model.compile(backend=fails)
    with pytest.raises(Exception, match="out of luck"):
        gradscope.patch(model, X, recipes=["attention"])
    assert "forward" not in vars(model.one)


@UNGRADED
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does, of a Function
def test_the_programs_own_limit_of_versions_holds(backend: Backend) -> None:
    """The step is compiled in more ways than Dynamo's limit allows, of which none counts afterwards."""
    from torch._dynamo import config

    model = Blocks(backend)
    with config.patch(recompile_limit=1, fail_on_recompile_limit_hit=False):
        patches = gradscope.patch(model, X, recipes=["attention", "gelu"])
        assert config.recompile_limit == 1
    assert not [result.reason for result in patches.verified.results if "error" in result.reason]
    with_softmax = ["softmax" in str(each.graph) for each in backend.graphs]
    assert any(with_softmax) and not all(with_softmax), "the step was compiled as it is, and with the recipe"
    backend.graphs.clear()
    model(X)
    assert backend.graphs, "what was compiled to be measured is gone"


def test_what_torch_keeps_from_dynamo_is_not_compiled(backend: Backend) -> None:
    """Checkpointing is called by a wrapper of Dynamo's too."""
    net = Net()
    net.forward = lambda x: net.two(torch.utils.checkpoint.checkpoint(net.one, x, use_reentrant=False))
    torch.compile(lambda x: x + 1, backend=backend)(X)
    found = gradscope.plan(net, X, recipes=["attention"])
    assert [(site.path, site.reasons) for site in found.sites] == [("one", []), ("two", [])]


def test_a_pattern_of_torchs_own_code(backend: Backend) -> None:
    """Of a compiled head no frame is the user's."""
    batch = torch.randn(6, 8), torch.randint(50, (6,))
    found = gradscope.plan(Head(backend), batch, recipes=["linear_cross_entropy"])
    assert [site.reasons for site in found.sites] == [[REASON]]


def test_a_step_is_proved_without_compiling(backend: Backend) -> None:
    net = Net()
    wrapped(net, backend)
    unit, plain = (Unit("", each, each, (X,), {}) for each in (net, Net()))
    plain.module.load_state_dict({name.replace("_orig_mod.", ""): held for name, held in net.state_dict().items()})
    for mine, other in zip(unit.references, plain.references, strict=True):
        assert {name.replace("_orig_mod.", "") for name in mine} == set(other)
        for name, held in mine.items():
            assert torch.equal(held, other[name.replace("_orig_mod.", "")])
    assert backend.graphs == []


@UNGRADED
def test_the_measured_step_is_compiled_as_alone(backend: Backend) -> None:
    """Only the user's own code is, and with it the part that is compiled runs as it does in training."""
    net = Net()
    wrapped(net, backend)
    found = gradscope.patch(net, X, recipes=["attention"])
    assert [result.reason for result in found.verified.results if result.status == "refused"] == []
    assert found.verified.compiled
    assert backend.graphs
    assert not [node for graph in backend.graphs for node in graph.graph.nodes if OURS in (node.stack_trace or "")]


def test_what_dynamo_leaves_alone_is_not_compiled() -> None:
    """It has torch's mark of a compiled function too."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    assert is_compiled(torch.compile(function, backend="eager"))
    assert not is_compiled(torch.compiler.disable(function)) and not is_compiled(function)
