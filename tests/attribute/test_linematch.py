"""Lines of steps that differ from the survey: by call, and none where it cannot be told. Counts, no clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradscope.attribute.linechoice import LayerCall, Site
from gradscope.attribute.linematch import NOT_TOLD, LineMatcher, Operations, Traced, calls_made, lines_of_nodes
from gradscope.attribute.nodes import OUTSIDE
from gradscope.attribute.rows import INHERIT, read_skeleton
from gradscope.attribute.survey import unit_rows
from gradscope.tables import RowKind

from .hand import NO_SPANS, Row, place, spans, table_of


def operations(*calls: tuple[int, str], sites: dict[int, Site] | None = None, first: int = 0) -> Operations:
    """What a step ran: (layer, names of the operations) of each call, in order."""
    keys = [(owner, name) for owner, names in calls for name in names.split()]
    numbers = [first + number for number, (_, names) in enumerate(calls) for _ in names.split()]
    return Operations(keys, np.array(numbers, np.int64), sites or {})


def matcher(ran: Operations, *lines: int) -> LineMatcher:
    return LineMatcher(lambda: [Traced(ran, np.array(lines))])


SURVEY = matcher(
    operations((0, "mul add"), (1, "exp"), (0, "mul add"), (2, "a b c b d"), (4, "m a p b n a p b k")),
    *(10, 11, 20, 10, 11, 30, 31, 32, 33, 34, *range(40, 49)),
)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([(0, "mul add")], [10, 11]),  # once instead of twice
        ([(1, "exp"), (0, "mul add"), (0, "mul add"), (0, "mul add")], [20, 10, 11, 10, 11, 10, 11]),
        ([(3, "mul add")], [NOT_TOLD] * 2),  # a layer that the survey did not call
        ([(2, "a b c b d c b d")], [NOT_TOLD] * 8),  # one turn more of a short loop, or another branch that is like it
        ([(1, "neg exp")], [NOT_TOLD] * 2),  # another branch, whose exp need not be the one that was seen
        ([(0, "add")], [NOT_TOLD]),
        # Eight names on one side are no chance.
        ([(4, "m a p b n a p b k z")], [40, *[NOT_TOLD] * 9]),
        ([(4, "a p b")], [NOT_TOLD] * 3),
    ],
)
def test_each_call_is_told_by_itself(calls: list[tuple[int, str]], expected: list[int]) -> None:
    assert SURVEY.lines(operations(*calls)).tolist() == expected


CLOSURE = "mm relu mul mul add exp sum mul mul add exp sum neg"  # as torch calls them, twice the same in the middle


@pytest.mark.parametrize("times", [1, 3, 4])
def test_what_runs_more_or_less_often_is_told_by_all_that_is_around_it(times: int) -> None:
    """A closure that the optimizer calls until it is content: its lines are known, however often it ran."""
    lines = list(range(CLOSURE.count(" ") + 1))
    survey = matcher(operations((-1, f"{CLOSURE} {CLOSURE}")), *lines, *lines)
    assert survey.lines(operations((-1, " ".join([CLOSURE] * times)))).tolist() == lines * times


def test_what_is_before_and_what_is_behind_may_disagree() -> None:
    """The long beginning is that of one line, the long end that of another: neither is believed."""
    survey = matcher(operations((1, "s t u v p x y m"), (1, "q u v p x y z w")), *range(10, 18), *range(20, 28))
    told = survey.lines(operations((1, "s t u v p x y z w"))).tolist()
    assert told[4] == NOT_TOLD and told[:2] == [10, 11] and told[-1] == 27


def test_what_is_behind_decides_where_what_is_before_was_never_seen() -> None:
    """Few on one side and many on the other are not the same as many and few of the same names."""
    one, other = "p q x r s b c d e f g", "p q x r s h i j k l m"
    survey = matcher(operations((1, f"{one} t"), (1, f"{other} u")), *range(100, 112), *range(200, 212))
    assert survey.lines(operations((1, f"y z {one} v"))).tolist()[4] == 102
    assert survey.lines(operations((1, f"y z {other} v"))).tolist()[4] == 202


def test_what_is_learned_later_is_known() -> None:
    survey = matcher(operations((1, "a b c")), 10, 11, 12)
    step = operations((1, "d e f g"))
    assert survey.lines(step).tolist() == [NOT_TOLD] * 4
    survey.learn(lambda: [Traced(operations((1, "d e f h")), np.array([20, 21, 22, 23]))])
    assert survey.lines(step).tolist() == [NOT_TOLD] * 4
    survey.learn(lambda: [Traced(operations((1, "d e f g")), np.array([20, 21, 22, 24]))])
    assert survey.lines(step).tolist() == [20, 21, 22, 24]


def test_a_branch_that_nobody_saw_may_share_operations_with_one_that_was_seen() -> None:
    """Between two calls; what is beyond a call from where it was made before is on its way again."""
    survey = matcher(operations((1, "stem relu exp mul head")), *range(5))
    assert survey.lines(operations((1, "stem relu tanh exp mul head"))).tolist() == [NOT_TOLD] * 6
    survey = matcher(around_calls("neg", (1, 50), "exp", "mul"), 5, 6, 7)
    assert survey.lines(around_calls("neg", "sin", (1, 50), "exp", "mul")).tolist() == [NOT_TOLD, NOT_TOLD, 6, 7]


@pytest.mark.parametrize("body", ["a a a", "a b a b", "a a a a a", "a a b a a b"])
def test_a_loop_that_ran_once_more_is_no_other_line_of_it(body: str) -> None:
    """Its last operation and its first are next to each other as others in the middle of it are."""
    lines = list(range(1, body.count(" ") + 2))
    survey = matcher(operations((1, f"stem {body} head")), 0, *lines, 99)
    for times in (2, 3):
        told = survey.lines(operations((1, " ".join(["stem", *[body] * times, "head"])))).tolist()
        assert all(line in (NOT_TOLD, true) for line, true in zip(told, [0, *lines * times, 99], strict=True))


def test_the_optimizers_own_arithmetic_is_not_called_by_the_user() -> None:
    """Its closure's is: that has gradients on, and a number."""
    table = table_of(
        Row(RowKind.OPTIMIZER, 0, 100, "Optimizer.step"),
        Row(RowKind.OP, 10, 20, "aten::mul", sequence=5),
        Row(RowKind.OP, 30, 40, "aten::add_"),
        Row(RowKind.OP, 110, 120, "aten::sub"),
    )
    skeleton = read_skeleton(table, spans((0, 0, 1)), [-1])
    assert [table.names[table.name[row]] for row in unit_rows(skeleton)] == ["aten::mul", "aten::sub"]


def test_a_layer_called_from_two_lines_is_told_by_what_its_caller_did() -> None:
    called = LayerCall(1, -1)
    did, other = ("mul", called, "add", called), ("add", called, "mul", called)
    survey = matcher(operations((1, "relu"), (1, "relu"), sites={0: (did, 1), 1: (did, 3)}), 5, 6)

    def told(*sites: Site) -> list[int]:
        step = operations(*[(1, "relu")] * len(sites), sites=dict(enumerate(sites, 7)), first=7)
        return survey.lines(step).tolist()

    assert told((did, 3), (did, 1), (did, 3)) == [6, 5, 6]
    assert told((other, 1), (other, 3)) == [NOT_TOLD] * 2


def test_a_call_is_told_by_the_layers_that_it_called_too() -> None:
    """``f(a(x))`` on one line is not ``f(b(x))`` on another, nor is a layer between two operations nothing."""

    def ran(*layers: int) -> Operations:
        first, *others = (LayerCall(layer, -1) for layer in layers)
        inside: list[int | LayerCall] = [first, 0, *others, 1]
        return Operations([(0, "relu"), (0, "add")], np.zeros(2, np.int64), {}, {0: inside})

    survey = matcher(ran(1, 2), 10, 11)
    assert survey.lines(ran(1, 2)).tolist() == [10, 11]
    assert survey.lines(ran(3, 2)).tolist() == [NOT_TOLD, 11]
    assert survey.lines(ran(1)).tolist() == [NOT_TOLD, NOT_TOLD]
    assert survey.lines(ran(1, 4, 2)).tolist() == [NOT_TOLD, 11]


def around_calls(*ran: str | tuple[int, int]) -> Operations:
    """One call of layer 0 that ran these: names of operations, and (layer, number of the instruction) of calls."""
    names = [each for each in ran if isinstance(each, str)]
    places = iter(range(len(names)))
    inside = [next(places) if isinstance(each, str) else LayerCall(*each) for each in ran]
    return Operations([(0, name) for name in names], np.zeros(len(names), np.int64), {}, {0: inside})


def test_the_same_operations_around_calls_from_another_instruction_are_not_the_same() -> None:
    """``f(a(x))`` on two lines."""
    survey = matcher(around_calls((1, 50), "relu", (2, 70)), 10)
    assert survey.lines(around_calls((1, 50), "relu", (2, 70))).tolist() == [10]
    assert survey.lines(around_calls((1, 60), "relu", (2, 70))).tolist() == [NOT_TOLD]
    assert survey.lines(around_calls((1, 50), "relu", (2, 80))).tolist() == [NOT_TOLD]
    survey.learn(lambda: [Traced(around_calls((1, 60), "relu", (2, 70)), np.array([11]))])
    assert survey.lines(around_calls((1, 60), "relu", (2, 70))).tolist() == [11]


def test_a_loop_over_other_layers_than_the_traced_is_the_same_loop() -> None:
    """``for layer in some: x = layer(x) + x``, and a head behind it."""
    survey = matcher(around_calls((1, 50), "add", (2, 50), "add", (3, 50), "add", (9, 70), "mean"), 10, 10, 10, 11)
    step = around_calls((3, 50), "add", (3, 50), "add", (2, 50), "add", (9, 70), "mean")
    assert survey.lines(step).tolist() == [10, 10, 10, 11]
    assert survey.lines(around_calls((3, 50), "mul", (9, 70), "mean")).tolist() == [NOT_TOLD, 11]
    assert survey.lines(around_calls((3, 51), "add", (1, 51), "add", (9, 70), "mean")).tolist()[:2] == [NOT_TOLD] * 2


def test_a_loop_that_asks_which_layer_it_calls_is_believed_for_layers_that_were_seen() -> None:
    """``x = layer(x); x = f(x) if isinstance(layer, A) else f(x)`` on two lines; or f in front of the call."""
    survey = matcher(around_calls("neg", (1, 50), "exp", (1, 50), "exp", (9, 70), "mean"), 5, 10, 10, 11)
    told = survey.lines(around_calls("neg", (3, 50), "exp", (1, 50), "exp", (9, 70), "mean")).tolist()
    assert told == [NOT_TOLD, NOT_TOLD, 10, 11], "what is beside layer 3 may be on another line"
    survey = matcher(around_calls("neg", "exp", (1, 50), "exp", (1, 50), "mean"), 5, 10, 10, 11)
    told = survey.lines(around_calls("neg", "exp", (3, 50), "exp", (1, 50), "mean")).tolist()
    assert told[1] == NOT_TOLD and told[-1] == 11


def test_where_the_layer_decides_which_line_follows_its_call_it_is_asked_for() -> None:
    survey = matcher(around_calls((1, 50), "relu", (8, 70), "exp"), 10, 20)
    survey.learn(lambda: [Traced(around_calls((2, 50), "relu", (8, 70), "exp"), np.array([11, 20]))])
    for layer, line in ((1, 10), (2, 11), (3, NOT_TOLD)):
        assert survey.lines(around_calls((layer, 50), "relu", (8, 70), "exp", "neg")).tolist()[0] == line


def test_a_layer_called_from_two_lines_is_told_by_which_instruction_called_it() -> None:
    """Their callers ran the same otherwise."""
    did = {caller: (("mul", LayerCall(1, caller)), 1) for caller in (50, 60, 70)}
    survey = matcher(operations((1, "relu"), sites={0: did[50]}), 5)
    survey.learn(lambda: [Traced(operations((1, "relu"), sites={0: did[60]}), np.array([6]))])
    for caller, line in ((50, 5), (60, 6), (70, NOT_TOLD)):
        assert survey.lines(operations((1, "relu"), sites={0: did[caller]})).tolist() == [line]


def test_calls_from_instructions_that_are_not_known_are_from_no_same_one() -> None:
    """They are no loop, whatever layers they call."""

    def told(caller: int) -> int:
        survey = matcher(around_calls((1, caller), "relu", (2, caller)), 10)
        survey.learn(lambda: [Traced(around_calls((3, caller), "relu", (4, caller)), np.array([10]))])
        return int(survey.lines(around_calls((1, caller), "relu", (4, caller)))[0])

    assert told(50) == 10 and told(-1) == NOT_TOLD


def in_no_call(owner: int, *ran: str | tuple[int, int]) -> Operations:
    """The same as :func:`around_calls`, outside of every call."""
    step = around_calls(*ran)
    keys = [(owner, name) for _, name in step.keys]
    return Operations(keys, np.full(len(keys), -1), {}, {-1: step.inside[0]})


def test_outside_of_every_layer_it_matters_too_what_was_called() -> None:
    """``loss(a(x))`` of one line of a loop is not ``loss(b(x))`` of another."""
    survey = matcher(in_no_call(OUTSIDE, (1, 50), "mean", (2, 70)), 10)
    assert survey.lines(in_no_call(OUTSIDE, (1, 50), "mean", (2, 70))).tolist() == [10]
    assert survey.lines(in_no_call(OUTSIDE, (1, 60), "mean", (2, 70))).tolist() == [NOT_TOLD]


def test_what_a_layer_runs_again_does_not_depend_on_what_the_loop_calls() -> None:
    """A recompute lies in no call, nor among what runs outside of all."""
    survey = matcher(in_no_call(3, (1, 50), "mul", (2, 70), "add"), 10, 11)
    assert survey.lines(in_no_call(3, (8, 90), "mul", "add")).tolist() == [10, 11]


def test_what_another_layer_runs_in_the_same_call_does_not_matter() -> None:
    def ran(other: str) -> Operations:
        return Operations([(0, "mul"), (7, other), (0, "add")], np.zeros(3, np.int64), {}, {0: [0, 1, 2]})

    assert matcher(ran("exp"), 10, 11, 12).lines(ran("neg")).tolist() == [10, NOT_TOLD, 12]


def test_a_call_has_the_instruction_of_its_own_number() -> None:
    """Rows may lie in another order than calls were made in, and begin with a later one."""
    table = table_of(
        Row(RowKind.CALL, 0, 10, "call", argument=2),
        Row(RowKind.CALL, 20, 30, "call", argument=1),
    )
    calls = replace(spans((7, 0, 0), (8, 0, 0), (9, 0, 0)), caller=np.array([50, 60, 70]))
    skeleton = read_skeleton(table, calls, [-1] * 10)
    assert calls_made(skeleton, np.array([0, 1])) == (LayerCall(9, 70), LayerCall(8, 60))


def test_a_node_has_the_line_of_what_drew_its_number() -> None:
    """Also the last of a step, and a node that another one made while it ran (create_graph)."""
    forward = [Row(RowKind.OP, 10 + number, 11 + number, f"aten::{number}", sequence=number) for number in range(2)]
    drawn = Row(RowKind.OP, 115, 120, "drawn in a node", sequence=2)
    runs = (
        node(110, 1, drawn),
        node(140, 0),
        [Row(RowKind.BACKWARD, 300, 400, "backward", argument=1), *node(310, 2)],
    )
    table = table_of(
        Row(RowKind.CALL, 0, 50, "call", argument=0),
        *forward,
        Row(RowKind.BACKWARD, 100, 200, "backward", argument=1),
        *(row for rows in runs for row in rows),
    )
    skeleton = read_skeleton(table, spans((0, 0, 2)), [-1])
    units = np.array([place(table, row.name) for row in forward])
    line = np.full(len(table), INHERIT, np.int64)
    line[units] = [50, 51]
    found = lines_of_nodes(skeleton, np.arange(len(skeleton.nodes.row)), units, line)
    told = dict(zip(skeleton.nodes.sequence.tolist(), found.tolist(), strict=True))
    assert told == {0: 50, 1: 51, 2: 51}


@pytest.mark.parametrize("kind", [RowKind.CALL, RowKind.RECOMPUTE, RowKind.ANNOTATION])
def test_a_node_that_is_made_in_a_recompute_has_no_line_of_the_node_around_it(kind: RowKind) -> None:
    """That node has only unpacked what it had saved; what it runs by itself has its line."""
    table = table_of(
        Row(RowKind.OP, 10, 11, "aten::mul", sequence=0),
        Row(RowKind.BACKWARD, 100, 200, "backward", argument=1),
        *node(110, 0, Row(kind, 113, 120, "again", argument=0), Row(RowKind.OP, 114, 119, "aten::exp", sequence=1)),
        *node(150, 1),
    )
    skeleton = read_skeleton(table, spans((0, 0, 1)), [-1])
    line = np.full(len(table), INHERIT, np.int64)
    first = place(table, "aten::mul")
    line[first] = 50
    units = np.array([first, place(table, "aten::exp")])
    assert lines_of_nodes(skeleton, np.arange(2), units, line).tolist() == [
        50,
        50 if kind == RowKind.ANNOTATION else -1,
    ]


def test_numbers_of_threads_are_their_own() -> None:
    """Both have drawn 4, and one of them 3 before the trace began."""
    drawn = [Row(RowKind.OP, 10, 11, f"of {thread}", thread=thread, sequence=4) for thread in (1, 2)]
    ran = ((3, 1), (3, 2), (4, 1), (4, 2))
    table = table_of(
        *drawn,
        Row(RowKind.OP, 5, 6, "early", thread=2, sequence=3),
        Row(RowKind.BACKWARD, 100, 300, "backward", argument=0),
        *(
            Row(RowKind.NODE, 110 + 20 * at, 120 + 20 * at, "N", sequence=number, forward_thread=thread)
            for at, (number, thread) in enumerate(ran)
        ),
    )
    skeleton = read_skeleton(table, NO_SPANS, [])
    units = np.array([place(table, name) for name in ("of 1", "of 2", "early")])
    line = np.full(len(table), INHERIT, np.int64)
    line[units] = [50, 60, 70]
    assert lines_of_nodes(skeleton, np.arange(4), units, line).tolist() == [-1, 70, 50, 60]


def node(start: int, number: int, *inside: Row) -> list[Row]:
    """A node and its function."""
    function = Row(RowKind.OP, start + 1, start + 15, "MulBackward0", sequence=number, forward_thread=1)
    return [
        Row(RowKind.NODE, start, start + 20, "MulBackward0", sequence=number, forward_thread=1),
        function,
        *inside,
    ]


# -- in real programs --------------------------------------------------------------------------------------------------
