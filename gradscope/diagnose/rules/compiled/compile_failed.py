"""torch.compile failed to compile a function, or compiles nothing of it, and it runs as it was written.

Example::

    torch._dynamo.config.suppress_errors = True  # an error while it compiles is a line in the log
    nn.TransformerEncoderLayer(512, 8).compile()  # before torch 2.14 this does nothing, without a word

Pattern: functions of which Dynamo has noted that their backend, or Dynamo itself, raised; not those that are left as
they are for a break, or for the number of their versions; and layers all of whose code is torch's own on which
``compile`` was called, which Dynamo leaves alone where they are not inside of something else that it compiles.
Evidence: the error as torch tells it.
Estimate: none. What compiled code would take is known only once it compiles.

Source: torch/_dynamo/config.py (``suppress_errors``), convert_frame.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from gradscope.diagnose.case import Case, Rule, first
from gradscope.diagnose.compiled import facts_of
from gradscope.diagnose.findings import make_finding, several
from gradscope.ops import COMPILED_GRAPH, COMPILED_NODE, COMPILED_REGION
from gradscope.tables import Finding

# Rows that torch writes around what it has compiled.
_COMPILED = (COMPILED_REGION, COMPILED_GRAPH, COMPILED_NODE)
_LONGEST = 200  # characters of an error


def find(case: Case) -> Iterator[Finding]:
    """Yield a finding for each function, and one for all layers that are left alone."""
    functions: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for each in facts_of(case).get("failed", ()):
        functions[each["function"], each["place"]].append(each["reason"])
    for (function, place), reasons in functions.items():
        yield make_finding(
            RULE.name,
            case,
            None,
            severity="warning",
            layers=(),
            line=place or None,
            message=f"torch.compile fails on {function}{f' ({place})' if place else ''}, which runs as it was written",
            evidence=f"{several(len(reasons), 'time')} since profiling began: {reasons[-1][:_LONGEST]}",
            advice="Have the error raised to see all of it, and mend it, or leave torch.compile out there.",
            code="torch._dynamo.config.suppress_errors = False",
        )
    alone = facts_of(case).get("left_alone", ())
    compiled = {row.layer for row in case.run.ops if row.layer is not None and row.name.startswith(_COMPILED)}
    layers = [row.path for row in case.run.layers if row.path in alone and row.calls and not _holds(row.path, compiled)]
    if layers:
        classes = {row.path: row.class_name for row in case.run.layers}
        version = str(case.run.environment.get("torch", "")).partition("+")[0]
        yield make_finding(
            RULE.name,
            case,
            None,
            severity="warning",
            layers=layers,
            line=None,
            message=f"torch.compile compiles nothing of {first([each or 'the model' for each in layers])}",
            evidence=f"Torch {version} leaves layers of its own alone where compile() is called: they run as written",
            advice="Use torch.compile in place of compile() (its state_dict has _orig_mod in names), compile what is "
            "around them, or put them into a module of your own.",
            code="{0} = torch.compile({0})  # for {0}.compile()".format(_expression(layers[0], classes)),
        )


def _holds(path: str, layers: Collection[str]) -> bool:
    """Check that one of these is this layer, or is inside of it."""
    return any(not path or each == path or each.startswith(f"{path}.") for each in layers)


def _expression(path: str, classes: Mapping[str, str]) -> str:
    """The layer as the program would write it: ``model.blocks[0]``.

    Args:
        classes: of all layers, by path.
    """
    text, above = "model", ""
    for part in filter(None, path.split(".")):
        if classes.get(above) == "ModuleDict":
            text += f"[{part!r}]"
        else:
            text += f"[{part}]" if part.isdigit() else f".{part}"
        above = f"{above}.{part}".lstrip(".")
    return text


RULE = Rule("compile-failed", "what torch.compile fails on, or compiles nothing of, so that it runs as written", find)
