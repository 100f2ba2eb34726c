"""Another thread compiles something when a measurement begins."""

from __future__ import annotations

import pytest

from gradscope.compat import watching_dynamo

# Loading Dynamo warns of its own use of TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")


def test_a_compilation_that_runs_already_is_told() -> None:
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    told: list[bool] = []
    failed: list[Exception] = []
    running = callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0")
    running.__enter__()
    with watching_dynamo(told.append, failed.append):
        assert told == [True]
        running.__exit__(None, None, None)
        assert told == [True, False]
    assert not failed


def test_where_nothing_is_compiled_nothing_is_told() -> None:
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    told: list[bool] = []
    with watching_dynamo(told.append, pytest.fail):
        assert not told
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
            assert told == [True]
    assert told == [True, False]
