"""Tensors that gradscope refers to can be swapped, as torch does by itself for some."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gradscope
from gradscope import tensor_refs
from gradscope.tensor_refs import tensor_ref
from gradscope.trampoline import is_told_of

SWAP: Any = torch.utils.swap_tensors


@pytest.fixture
def swapping() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def test_a_reference_lets_go_of_what_is_swapped() -> None:
    one, other, third = torch.ones(2), torch.zeros(2), torch.ones(3)
    refs = [tensor_ref(each) for each in (one, other, third)]
    assert tensor_ref(one) is refs[0] and refs[0]() is one
    torch.utils.swap_tensors(one, other)
    assert [ref() for ref in refs[:2]] == [None, None] and refs[2]() is third
    assert one[0] == 0 and tensor_ref(one)() is one and tensor_ref(one) is not refs[0]


def test_swaps_are_told_of_while_there_are_references() -> None:
    gc.collect()
    held = torch.ones(2)
    ref = tensor_ref(held)
    assert is_told_of(SWAP)
    other = torch.ones(2)
    weak = weakref.ref(other)  # of the program's
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(other, torch.zeros(2))
    del held, weak
    assert ref() is None


@pytest.mark.parametrize("replaced", [lambda *, t1, t2: SWAP(t1, t2), functools.partial(SWAP)])
def test_torchs_own_function_is_told_of_where_a_program_has_put_another_one(
    replaced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that counts its swaps, say: the function that it kept is the one that refuses."""
    monkeypatch.setattr(torch.utils, "swap_tensors", replaced)
    assert tensor_refs._torchs_own(torch.utils.swap_tensors) is SWAP
    one = torch.ones(2)
    ref = tensor_ref(one)
    SWAP(t2=torch.zeros(2), t1=one)
    assert ref() is None


def test_an_id_that_is_given_again_is_another_tensors() -> None:
    one = torch.ones(2)
    ref, number = tensor_ref(one), id(one)
    del one
    assert ref() is None
    made = [torch.ones(2)]
    while id(made[-1]) != number:
        assert len(made) < 10_000
        made.append(torch.ones(2))
    assert tensor_ref(made[-1])() is made[-1] and ref() is None


def test_threads_that_refer_to_a_tensor_at_once_have_one_reference() -> None:
    """Else a swap would find the other one."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            tensor, begin, refs = torch.ones(2), threading.Barrier(4), list[Any]()

            def refer(tensor: torch.Tensor, begin: threading.Barrier, refs: list[Any]) -> None:
                begin.wait(60)
                refs.append(tensor_ref(tensor))

            threads = [threading.Thread(target=refer, args=(tensor, begin, refs)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len({id(ref) for ref in refs}) == 1
            torch.utils.swap_tensors(tensor, torch.zeros(2))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("how", ["to", "load", "swap"])
def test_a_program_that_swaps_in_each_step_goes_on(swapping: None, how: str) -> None:
    model = nn.Sequential(nn.Linear(11, 11), nn.Tanh(), nn.Linear(11, 3))
    x = torch.randn(7, 11)

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()
        if how == "to":
            model.to(torch.float64).to(torch.float32)
        elif how == "load":
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        else:
            for each in list(model.parameters()):
                torch.utils.swap_tensors(each, nn.Parameter(each.detach().clone()))

    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        while not prof.step():
            step()
    assert any("set_swap_module_params_on_conversion" in note for note in prof.report.data.notes)
    step()  # while the report lives
    assert {row.path for row in prof.report.data.layers} >= {"0", "2"}


def test_a_program_that_swaps_activations_goes_on() -> None:
    """What autograd made, in steps that are recorded too; without torch's setting."""
    model, x = nn.Linear(5, 5), torch.randn(3, 5)
    kept: list[torch.Tensor] = []

    def step() -> None:
        one, other = model(x) + 1, model(x) + 2
        torch.utils.swap_tensors(one, other)
        (one + 0).sum().backward()
        kept[:] = [one]

    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        while not prof.step():
            step()
    assert any("torch.utils.swap_tensors" in note for note in prof.report.data.notes)
    torch.utils.swap_tensors(kept[0], model(x))  # while the report lives
    assert not prof.report.data.partial


def test_the_first_swap_may_come_in_the_step_that_notes_shapes() -> None:
    model, x = nn.Linear(5, 5), torch.randn(3, 5)
    swapped = 0
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        while True:
            model(x).sum().backward()
            model.zero_grad()
            session: Any = prof._session
            if session.phase == "survey" and not swapped:
                torch.utils.swap_tensors(model.weight, nn.Parameter(model.weight.detach() + 1))
                swapped += 1
            if prof.step():
                break
    assert swapped == 1
    assert any(
        note.startswith("source lines, FLOPs and input shapes are not measured") for note in prof.report.data.notes
    )
    assert prof.report.data.partial and prof.report.data.memory is not None


def test_behind_a_run_all_can_be_swapped(swapping: None) -> None:
    model = nn.Linear(4, 4)
    with gradscope.profiling(model, steps=1, warmup=1) as prof:
        while not prof.step():
            model(torch.ones(2, 4)).sum().backward()
            model.zero_grad()
    model.to(torch.float64)
    assert model.weight.dtype == torch.float64
