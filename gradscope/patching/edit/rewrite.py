"""From a match to an edit of the source: the checks, and what the edit is made of."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from dataclasses import dataclass

from gradscope.patching.edit.aliases import check_aliases
from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.dead_code import DeadCode, check_asked_first, dead_code, own_statements
from gradscope.patching.edit.fallback import with_fallback
from gradscope.patching.edit.guards import relied_on
from gradscope.patching.edit.imports import RecipeNames
from gradscope.patching.edit.later_changes import check_changed_later
from gradscope.patching.edit.liveness import conditions_of_later_reads
from gradscope.patching.edit.new_call import NewCall
from gradscope.patching.edit.replacement import Known, Refusal, Replacement
from gradscope.patching.edit.replacements import Rewrite, replacements
from gradscope.patching.edit.side_effects import check_calls, check_feeds_match, check_run
from gradscope.patching.edit.size_guards import known_sizes
from gradscope.patching.edit.source import FunctionSource
from gradscope.patching.edit.syntax import names_in, reads_only, within
from gradscope.patching.edit.two_results import pair_of, second_of
from gradscope.patching.match import Match
from gradscope.recording.graph import Frame, Recording


@dataclass(frozen=True)
class Edit:
    """What one match changes in one function."""

    source: FunctionSource
    recipe: str
    line: int  # of the expression that stays
    replacements: tuple[Replacement, ...]
    imports: tuple[tuple[str, str], ...]  # (function of gradscope.recipes, its name in this file)
    names: frozenset[str] = frozenset()  # new ones, bound in this function

    @property
    def key(self) -> tuple[object, ...]:
        """Equal where the same is done to the same text."""
        return (self.source.file.name, self.recipe, self.replacements, self.imports)


def edit_of(
    match: Match, recording: Recording, frame: Frame, source: FunctionSource, taken: frozenset[str] = frozenset()
) -> Edit:
    """Return the edit of ``frame``'s function that replaces ``match``; of several ways, the first that is allowed.

    ``taken`` are names that other edits of the function bind.

    Raises:
        Refusal: the source does more than the match, or not only when the match does.
    """
    if match.reasons:
        raise Refusal("; ".join(match.reasons))
    ways = [match]
    if match.optional:
        wider = dataclasses.replace(match, nodes=match.nodes | match.optional, optional=frozenset())
        ways.insert(0, wider)
    for way in ways:
        try:
            return _edit(way, recording, frame, source, taken)
        except Refusal as refusal:
            reason = refusal
    for more in [giving for way in ways for giving in way.giving()]:
        with suppress(Refusal):
            return _edit(more, recording, frame, source, taken)
    if match.otherwise is not None:
        return edit_of(match.otherwise, recording, frame, source, taken)
    raise reason


def _edit(match: Match, recording: Recording, frame: Frame, source: FunctionSource, taken: frozenset[str]) -> Edit:
    """Return the edit that replaces all calls of ``match`` in one way."""
    if frame.suspends:
        raise Refusal("a generator or coroutine is not edited")
    check_run(match, recording, frame, source)
    calls = CallSites(source, frame, recording.executed_in(frame), match.last)
    _check_result(match, calls)
    own = own_statements(match, calls)
    check_aliases(match, calls)
    check_changed_later(match, recording, calls)
    recipes = RecipeNames(source.file, frame.globals)
    call = NewCall(match, calls, own.parts, recipes, taken)
    spelled = {name for each in call.spelled for name in names_in(each)}
    pair = pair_of(match, calls, own.parts, spelled, taken | call.names)
    dead = dead_code(calls, own, spelled)
    check_feeds_match(match, calls, dead.parts)
    conditions = [*dead.conditions, *conditions_of_later_reads(dead, calls, None if pair is None else pair.name)]
    others = check_calls(match, calls, [each for each in dead.parts if each not in dead.unchanging], call.spelled)
    known = [*others, *relied_on(match, recording, calls, recipes.name), *known_sizes(match, calls)]
    known += [each for each in dead.unchanging.values() if each.text]
    _check_known(known, dead, calls)
    second = second_of(match, recording, calls, conditional=bool(conditions))
    rewrite = Rewrite(match, calls, call, dead, tuple(conditions), tuple(known), second, pair)
    made = replacements(rewrite)
    if rewrite.guarded:
        made = [with_fallback(rewrite, made)]
    names = frozenset(call.names if pair is None else {*call.names, pair.output})
    return Edit(source, match.recipe, calls.stays.lineno, tuple(made), recipes.imports, names)


def _check_result(match: Match, calls: CallSites) -> None:
    """Raise Refusal where the result is made in another function, or its expression runs another call."""
    last = match.last
    if last.places[0].frame is not calls.frame:
        raise Refusal(f"the result of {last.op} is made in {last.places[0].frame.code.co_name}")
    own = {node.op for node in match.nodes}
    for node in calls.nodes:
        place = node.places[0]
        same = place.frame is calls.frame and calls.source.at(place.span) is calls.stays
        if same and node not in match.nodes and node.op not in own:
            raise Refusal(f"line {calls.stays.lineno}: the same call also runs {node.op}")


def _check_known(known: list[Known], dead: DeadCode, calls: CallSites) -> None:
    """Raise Refusal where something that the match relied on cannot be asked before the first removed statement."""
    for each in known:
        if not reads_only(each.expression):
            text = calls.source.file.of(each.expression)
            raise Refusal(f"line {each.expression.lineno}: {text} may be another number next time")
    for each in known:
        if within(calls.source.definition, each.expression):
            check_asked_first(each.expression, dead, calls)
