"""Where a recording can be rewritten: matches, their edits, and the modules whose code holds them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from gradscope.capture.registry import inner_paths
from gradscope.compat import is_compiled
from gradscope.patching.advice import attention_switch
from gradscope.patching.edit.rewrite import Edit, edit_of
from gradscope.patching.edit.source import FunctionSource, Refusal, SourceFile
from gradscope.patching.edit.syntax import private
from gradscope.patching.match.match import Match
from gradscope.recording.graph import Frame, Node, Recording
from gradscope.recording.live import LiveObjects

Matcher = Callable[[Recording], Iterator[Match]]


@dataclass(frozen=True)
class Link:
    """One function on the way from a module's method to the code that is edited."""

    function: FunctionType
    name: str  # how the function above calls it; of the first: the method's name
    wrappers: tuple[FunctionType, ...] = ()  # what decorators put around it, outermost first
    bound: bool = True  # a module's method; else, as the first, a function that the module holds under that name


@dataclass(eq=False, repr=False)
class Site:
    """One expression of one module's code, and what would stand there."""

    path: str  # of the module; "" is the root
    recipe: str
    file: str
    line: int
    live: LiveObjects = field(default_factory=LiveObjects)  # of the recording
    number: int = 0  # of all sites that were found in the recording
    edit: Edit | None = None
    reasons: list[str] = field(default_factory=list)
    matches: list[Match] = field(default_factory=list)
    differs_elsewhere: bool = False  # the same line of another module ran without the pattern, or is left as it is

    def __repr__(self) -> str:
        return f"<{self.recipe} in {self.path or 'the model'}, {self.source}>"

    @property
    def module(self) -> nn.Module | None:
        """The module whose code would change; None where it is no module's, and once the recording was dropped."""
        return self.live.modules.get(self.number)

    @property
    def chain(self) -> tuple[Link, ...]:
        """The functions from the module's method down to the one that is edited."""
        return self.live.chains.get(self.number, ())

    @property
    def function(self) -> str:
        """Return what the new call calls, of gradscope.recipes."""
        if self.edit is not None:
            return self.edit.imports[0][0]
        return self.matches[0].function if self.matches else self.recipe

    @property
    def supported(self) -> bool:
        """Return whether it can be replaced."""
        return self.edit is not None and not self.reasons

    @property
    def compiled(self) -> bool:
        """Return whether it runs under torch.compile."""
        return any(node.compiled is not None for match in self.matches for node in match.nodes)

    @property
    def idle(self) -> str:
        """Say why replacing it would gain nothing on this batch; empty where it may."""
        return self.matches[0].idle if self.matches and all(match.idle for match in self.matches) else ""

    @property
    def why_not(self) -> str:
        """Say why it is left alone. Nobody need rewrite what would gain nothing: that comes first."""
        return self.idle or "; ".join(self.reasons)

    @property
    def source(self) -> str:
        """Return the file and line: ``model.py:65``."""
        return f"{self.file}:{self.line}"


def find_sites(
    model: nn.Module, recording: Recording, matchers: Mapping[str, Matcher], files: dict[str, SourceFile]
) -> list[Site]:
    """Return every match of ``matchers`` as sites of ``model``, supported or with the reasons why not.

    ``files`` are source files read before; those read here are added.
    """
    finder = _Finder(model, recording, files)
    for matcher in matchers.values():
        for match in matcher(recording):
            finder.add(match)
    return finder.sites()


COMPILED = "torch.compile was applied to a function or layer in it, not to the module whose code would change"
_OURS = ("gradscope.recipes", "gradscope.kernels")


def _is_of_recipes(frame: Frame) -> bool:
    return str(frame.globals.get("__name__", "")).startswith(_OURS)


class _Finder:
    def __init__(self, model: nn.Module, recording: Recording, files: dict[str, SourceFile]) -> None:
        self.recording = recording
        self.paths = {module: path for path, module in inner_paths(model)}
        self.files = files
        self.found: dict[tuple[Any, ...], Site] = {}

    def sites(self) -> list[Site]:
        """Return the sites in the order of the run."""
        second = any(
            node.op in {"grad", "backward"} and node.kwargs.get("create_graph") for node in self.recording.nodes
        )
        taken: list[Site] = []
        for site in self.found.values():
            if second:
                site.reasons.append("the step computes a second derivative, which recipes do not support")
            if site.supported:
                self._check_every_round(site)
            if site.supported:
                other = next((other for other in taken if _overlap(site, other)), None)
                if other is not None:
                    site.reasons.append(f"it is part of {other.recipe} on line {other.line}")
                else:
                    taken.append(site)
        for site in taken:
            site.differs_elsewhere = self._differs_elsewhere(site, taken)
        for site in [site for site in self.found.values() if not site.supported]:
            if any(_shares_calls(site, other) for other in taken):  # what it lacks does not matter any more
                self.found = {key: other for key, other in self.found.items() if other is not site}
        return sorted(self.found.values(), key=lambda site: min(match.last.index for match in site.matches))

    def add(self, match: Match) -> None:
        """Make a site of a match, or add it to the one of the same code and module; of a recipe's own code nothing.

        Where the match is refused, of the part of it that is a pattern as well, if that is not.
        """
        site = self._added(match)
        if site is not None and site.reasons and match.less is not None:
            less = self._added(match.less)
            if less is not None and not less.supported:
                self.found = {key: each for key, each in self.found.items() if each is not less}

    def _added(self, match: Match) -> Site | None:
        """Return the site that a match is one of."""
        if any(_is_of_recipes(place.frame) for node in match.nodes for place in node.places):
            return None
        frame = _common(match)
        if frame is None:
            place = match.last.places[0] if match.last.places else None
            if place is None:  # torch's own code
                return None
            site = self._site(match, place.frame, place.span.line if place.span else 0)
            self._refuse(site, "the pattern is spread over several functions", match, place.frame)
            return site
        place = match.last.place_in(frame)
        line = place.span.line if place is not None and place.span is not None else 0
        site = self._site(match, frame, line)
        if site.reasons:
            return site
        try:
            _check_compiled(match, frame)
            chain = self._chain(match, frame)
            source = FunctionSource.of(frame.code, self.files)
            others = [other.edit for other in self.found.values() if other.module is site.module and other is not site]
            same = [
                other.names for other in others if other is not None and other.source.definition is source.definition
            ]
            edit = edit_of(match, self.recording, frame, source, frozenset().union(*same))
            if site.edit is not None and site.edit.key != edit.key:
                raise Refusal("the same line does different things within one step")
            site.edit, site.live.chains[site.number] = edit, chain
        except Refusal as refusal:
            self._refuse(site, str(refusal), match, frame)
        return site

    def _refuse(self, site: Site, reason: str, match: Match, frame: Frame) -> None:
        switch = attention_switch(match, frame, site.module, self.paths)
        site.reasons.append(f"{reason}; {switch}" if switch else reason)

    def _site(self, match: Match, frame: Frame, line: int) -> Site:
        owner = self._owner(match.last, frame)
        path = self.paths[owner] if owner is not None else ""
        key = (path, match.recipe, frame.code, match.last.place_in(frame).span)  # type: ignore[union-attr]
        site = self.found.get(key)
        if site is None:
            live = self.recording.live
            number = len(live.modules)
            site = self.found[key] = Site(path, match.recipe, frame.code.co_filename, line, live, number)
            live.modules[number] = owner
        site.matches.append(match)
        return site

    def _owner(self, last: Node, frame: Frame) -> nn.Module | None:
        """Return the module in whose method the frame runs, itself or further up."""
        frames = [place.frame for place in last.places]
        for above in frames[frames.index(frame) :]:
            if isinstance(above.owner, nn.Module) and above.owner in self.paths:
                return above.owner
        return None

    def _chain(self, match: Match, frame: Frame) -> tuple[Link, ...]:
        """Return the functions from the owner's method down to ``frame``."""
        frames = [place.frame for place in match.last.places]
        frames = frames[frames.index(frame) :]
        links: list[Link] = []
        if not any(isinstance(each.owner, nn.Module) and each.owner in self.paths for each in frames):
            raise Refusal("the code does not belong to any module of the model")
        for inner, outer in zip(frames, [*frames[1:], None], strict=True):
            owner = inner.owner
            if isinstance(owner, nn.Module) and owner in self.paths:
                links.append(_method(owner, inner))
                if outer is not None and outer.owner is owner:
                    self._check_asks_the_module(match, inner, outer)
                return tuple(reversed(links))
            if outer is None:
                break
            _check_compiled(match, outer)
            if inner.code in outer.code.co_consts:  # defined there: the function around it is compiled again
                continue
            held = self._held(inner, outer)
            if held is not None:
                return tuple(reversed([*links, held]))
            links.append(_called(inner, outer))
        raise Refusal("the code does not belong to any module of the model")

    def _check_asks_the_module(self, match: Match, inner: Frame, outer: Frame) -> None:
        """Raise Refusal where the method is called as the class's, which is that of all its modules."""
        place = match.last.place_in(outer)
        call = FunctionSource.of(outer.code, self.files).at(place.span) if place is not None else None
        above = call.func.value if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None
        of_class = isinstance(above, ast.Name) and isinstance(outer.globals.get(above.id), type)
        of_class = of_class or (isinstance(above, ast.Attribute) and above.attr == "__class__")
        if of_class or (isinstance(above, ast.Call) and ast.unparse(above.func) in {"type", "super"}):
            raise Refusal(f"{inner.code.co_name} is called through the class, not through the module")

    def _held(self, inner: Frame, outer: Frame) -> Link | None:
        """Return the function that ``inner`` runs, as an attribute that a module of the model or its class holds."""
        owner, names = outer.owner, outer.code.co_varnames[:1]
        if not isinstance(owner, nn.Module) or owner not in self.paths:
            return None
        tree = FunctionSource.of(outer.code, self.files).definition
        for part in ast.walk(tree):
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and (part.value.id,) == names:
                held = getattr(owner, part.attr, None)
                if isinstance(held, FunctionType) and held.__code__ is inner.code:
                    if any(
                        isinstance(each, ast.Name) and outer.globals.get(each.id) is held for each in ast.walk(tree)
                    ):
                        raise Refusal(f"{inner.code.co_name} is called by two names")
                    return Link(held, part.attr, bound=False)
        return None

    def _check_every_round(self, site: Site) -> None:
        """Refuse a site whose code also ran for its module without a match."""
        lasts = {match.last for match in site.matches}
        frame = _common(site.matches[0])
        span = site.matches[0].last.place_in(frame).span  # type: ignore[union-attr,arg-type]
        for node, other in self.recording.standing_at(frame.code, span):  # type: ignore[union-attr]
            if node in lasts or node.op != site.matches[0].last.op:
                continue
            if self._owner(node, other) is site.module:
                site.reasons.append("the same line also ran without the pattern")
                return

    def _differs_elsewhere(self, site: Site, taken: list[Site]) -> bool:
        """Return whether the text cannot be changed for every module that runs it."""
        last = site.matches[0].last
        place = last.place_in(_common(site.matches[0]))  # type: ignore[arg-type]
        assert place is not None and site.edit is not None
        same = [other for other in taken if other.edit is not None and other.edit.key == site.edit.key]
        lasts = {match.last for other in same for match in other.matches}
        there = self.recording.standing_at(place.frame.code, place.span)
        return any(node.op == last.op and node not in lasts for node, _ in there)


def _overlap(one: Site, other: Site) -> bool:
    """Return whether two sites change the same text."""
    if one.edit is None or other.edit is None or one.file != other.file or one.module is not other.module:
        return False
    return any(
        mine.start < theirs.end and theirs.start < mine.end and not (mine.tidies and mine == theirs)
        for mine in one.edit.replacements
        for theirs in other.edit.replacements
    )


def _shares_calls(one: Site, other: Site) -> bool:
    """Return whether two sites are about the same calls, as attention and packed attention are."""
    mine, theirs = ({node for match in site.matches for node in match.nodes | match.later} for site in (one, other))
    return not mine.isdisjoint(theirs)


def _common(match: Match) -> Frame | None:
    """Return the innermost frame under which all of a match happened."""
    for place in match.last.places:
        if all(node.place_in(place.frame) is not None for node in match.nodes):
            return place.frame
    return None


def _check_compiled(match: Match, frame: Frame) -> None:
    """Raise Refusal where torch.compile made something that is called below ``frame``, whose new code would not be."""
    for node in match.nodes | match.optional | match.later:
        if node.compiled is not None and any(place.frame is frame for place in node.places[node.compiled :]):
            raise Refusal(COMPILED)


def _method(owner: nn.Module, frame: Frame) -> Link:
    """Return the method of ``owner`` that ``frame`` runs."""
    name = private(frame.code.co_name, frame.code)
    held = getattr(type(owner), name, None)
    if isinstance(inspect.getattr_static(type(owner), name, None), staticmethod):
        raise Refusal(f"{name} is a static method, so it does not receive the module")
    above = next((kind for kind in type(owner).__mro__ if _code_of(kind, name) is frame.code), None)
    if above is not None and getattr(held, "__code__", None) is not frame.code and not hasattr(held, "__wrapped__"):
        raise Refusal(f"{name} is defined in {above.__name__}, but overridden in {type(owner).__name__}")
    own = vars(owner).get(name)
    if is_compiled(own) or is_compiled(held):
        raise Refusal(COMPILED)
    if own is not None and (not isinstance(own, MethodType) or own.__func__ is not held or own.__self__ is not owner):
        raise Refusal(f"{name} was already replaced on this module")
    wrappers = []
    while isinstance(held, FunctionType) and held.__code__ is not frame.code and hasattr(held, "__wrapped__"):
        wrappers.append(held)
        held = held.__wrapped__
    if not isinstance(held, FunctionType) or held.__code__ is not frame.code:
        raise Refusal(f"{name} is decorated, or not a method of {type(owner).__name__}")
    if held.__code__.co_name != frame.code.co_name:
        raise Refusal(f"{name} is the name of another function")
    for wrapper, inner in zip(wrappers, [*wrappers, held][1:], strict=True):
        if not any(inner in bound(cell) for cell in wrapper.__closure__ or ()):
            raise Refusal(f"{name} has a decorator that cannot be reapplied")
    return Link(held, name, tuple(wrappers))


def _code_of(kind: type, name: str) -> object:
    return getattr(vars(kind).get(name), "__code__", None)


def bound(cell: CellType) -> list[object]:
    """Return what a free name holds; nothing where it is not bound yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _called(inner: Frame, outer: Frame) -> Link:
    """Return the function that ``inner`` runs, as a global name of ``outer``'s module.

    Raises:
        Refusal: it is called otherwise: as an attribute of a module of Python's, of an object, of a part that the
            model does not register.
    """
    for name, held in outer.globals.items():
        if isinstance(held, FunctionType) and held.__code__ is inner.code and name in outer.code.co_names:
            return Link(held, name)
    name, owner = inner.code.co_name, inner.owner
    if isinstance(owner, nn.Module):
        raise Refusal(f"{name} belongs to {type(owner).__name__}, which is not part of the model")
    raise Refusal(f"{name} is called neither by its own name nor as an attribute of the module")
