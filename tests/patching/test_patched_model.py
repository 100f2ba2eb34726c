"""A patched model is used as before: what is moved, copied, wrapped, transformed and saved goes on working."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tests.patching.exactness import TOLERANCE, check_exact, difference, patched, results
from tests.patching.gpt_block import LENGTH, LONGEST, WIDTH, Attention, Model, x


def _state(model: nn.Module) -> list[tuple[Any, ...]]:
    """Everything a module holds by name, by identity, but for a method of its own that patching puts there."""
    return [
        (name, key, id(value))
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key != "forward"
    ]


def test_the_edit_is_as_one_would_write_it():
    diff = patched(Model(), x()).diff
    assert [
        line for line in diff.splitlines() if line.startswith(("+", "-")) and not line.startswith(("+++", "---"))
    ] == [
        "-import torch.nn.functional as F",
        "+from gradscope.recipes import attention, attention_mask",
        "-        att = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)",
        '-        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))',
        "-        att = F.softmax(att, dim=-1)",
        "-        att = self.attn_dropout(att)",
        "-        y = att @ v",
        "+        y = attention(",
        "+            q,",
        "+            k,",
        "+            v,",
        "+            dropout_p=self.attn_dropout.p if self.attn_dropout.training else 0.0,",
        "+            scale=1.0 / k.size(-1) ** 0.5,",
        '+            **attention_mask(self.bias[:, :, :t, :t], hides="zero"),',
        "+        )",
    ]


# ----------------------------------------------------------------------------------------------------------------------
# Other inputs and settings than the recorded ones
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, LENGTH - 1, LENGTH + 1, LONGEST])
@pytest.mark.parametrize("batch", [1, 3])
def test_other_lengths_and_batches(length, batch):
    check_exact(Model(), x(), later=x(length, batch))


def test_longer_than_the_mask_is_what_a_longer_mask_would_give():  # the original raises
    model, original = Model(), Model()
    patched(model, x())
    longer = torch.ones(1, 1, LONGEST + 1, LONGEST + 1).tril()
    original.attn.bias = longer
    later = x(LONGEST + 1)
    assert difference(results(original, later), results(model, later)) <= TOLERANCE


def test_patched_in_training_and_used_in_evaluation_and_the_other_way_round():
    check_exact(Model().train(), x(), nn.Module.eval)
    check_exact(Model().eval(), x(), nn.Module.train)


def test_the_share_dropped_is_read_in_every_step():
    model = Model()
    patched(model, x())
    model.attn.attn_dropout.p = 1.0
    model(x())  # all is dropped: the attention adds its bias alone
    h = model.inp(x())
    assert torch.allclose(model(x()), model.out(h + model.attn.c_proj.bias), atol=1e-6)
    model.eval()
    assert not torch.allclose(model(x()), model.out(h + model.attn.c_proj.bias), atol=1e-3)


def test_dropout_drops_the_share():
    model = Model()
    patched(model, x())
    model.attn.attn_dropout.p = 0.4
    torch.manual_seed(0)
    mean = sum(model(x()).detach() for _ in range(400)) / 400
    model.eval()
    spread = (mean - model(x())).abs().max()
    # 400 draws leave a twentieth of one draw's deviation, which is below 1 here; no dropout at all would leave nothing.
    assert 1e-4 < spread < 0.3


def _seen_ahead(model):
    with torch.no_grad():
        model.attn.bias[..., 2, 5] = 1.0


def _all_seen(model):
    model.attn.bias = torch.ones_like(model.attn.bias)


@pytest.mark.parametrize("change", [_seen_ahead, _all_seen])
def test_a_mask_changed_after_patching(change):
    check_exact(Model(), x(), change)


def test_a_mask_changed_between_two_steps():
    model, original = Model(), Model()
    patched(model, x())
    for change in (lambda each: None, _seen_ahead, _all_seen):
        for each in (model, original):
            change(each)
        assert difference(results(original, x()), results(model, x())) <= TOLERANCE


# ----------------------------------------------------------------------------------------------------------------------
# Copies, files, hooks
# ----------------------------------------------------------------------------------------------------------------------


def test_a_deep_copy_is_patched_and_works_on_its_own_parameters():
    model = Model()
    patched(model, x())
    other = copy.deepcopy(model)
    assert other.attn.forward.__self__ is other.attn
    assert other.attn.forward.__func__ is model.attn.forward.__func__
    with torch.no_grad():
        for each in other.parameters():
            each.mul_(0.5)
    original = Model()
    original.load_state_dict(other.state_dict())
    assert difference(results(original, x()), results(other, x())) <= TOLERANCE
    assert difference(results(Model(), x()), results(model, x())) <= TOLERANCE


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("through", [lambda model: pickle.loads(pickle.dumps(model)), _saved], ids=["pickle", "save"])
def test_a_saved_model_comes_back_unpatched(through):
    model = Model()
    patched(model, x())
    other = through(model)
    assert other.attn.forward.__func__ is Attention.forward
    assert torch.equal(other(x()), Model()(x()))
    before = dict(vars(other.attn))
    patches = patched(other, x())  # and can be patched again
    assert patches.table.supported.all()
    patches.revert()
    assert vars(other.attn) == before


def test_the_state_dict_is_the_same():
    model, original = Model(), Model()
    patched(model, x())
    new, old = model.state_dict(), original.state_dict()
    assert list(new) == list(old)
    assert all(torch.equal(new[name], old[name]) for name in old)
    model.load_state_dict(old)
    assert model.attn.bias is dict(model.named_buffers())["attn.bias"]


def test_hooks_of_the_patched_module_fire():
    model = Model()
    patched(model, x())
    seen = []
    model.attn.register_forward_pre_hook(lambda module, args: seen.append("before"))
    model.attn.register_forward_hook(lambda module, args, output: seen.append("after"))
    model.attn.register_full_backward_hook(lambda module, into, out: seen.append("backward"))
    model(x().requires_grad_()).sum().backward()
    assert seen == ["before", "after", "backward"]


def test_hooks_from_before_patching_fire():
    model = Model()
    seen = []
    model.attn.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    patched(model, x())
    seen.clear()
    model(x())
    assert seen == [(2, LENGTH, WIDTH)]


# ----------------------------------------------------------------------------------------------------------------------
# On and off
# ----------------------------------------------------------------------------------------------------------------------


def test_patching_twice_changes_nothing():
    model = Model()
    patched(model, x())
    forward = model.attn.forward
    again = patched(model, x())
    assert not again.table.supported.any()
    assert model.attn.forward == forward


def test_reverted_bit_for_bit():
    model = Model()
    before, output = _state(model), model(x())
    patches = patched(model, x())
    assert "forward" in vars(model.attn)
    assert _state(model) == before
    patches.revert()
    assert "forward" not in vars(model.attn)
    assert _state(model) == before
    assert torch.equal(model(x()), output)


def test_other_modules_of_the_class_are_left_alone():
    model, other = Model(), Model()
    patched(model, x())
    assert "forward" not in vars(other.attn)
    assert Attention.forward is other.attn.forward.__func__


def test_a_model_that_raises_is_left_as_it_was():
    model = Model()
    model.broken = True
    before = _state(model)
    with pytest.raises(RuntimeError, match="broken"):
        patched(model, x())
    assert _state(model) == before
    assert "forward" not in vars(model.attn)


def test_a_patched_model_that_raises_goes_on_afterwards():
    model, original = Model(), Model()
    patches = patched(model, x())
    model.broken = True
    with pytest.raises(RuntimeError, match="broken"):
        model(x())
    model.broken = False
    assert difference(results(original, x()), results(model, x())) <= TOLERANCE
    patches.revert()
    assert "forward" not in vars(model.attn)
