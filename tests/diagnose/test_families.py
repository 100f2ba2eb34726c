"""Where a rule lies: one a file, in a family, under the name of the rule."""

from __future__ import annotations

import ast
from pathlib import Path

from gradscope.diagnose import rules
from gradscope.diagnose.rules import RULES

FOLDER = Path(rules.__file__).parent


def _files_of_rules() -> dict[str, Path]:
    """The name that a file gives its rule, and the file."""
    found = {}
    for path in FOLDER.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Call)
                and "RULE" in ast.unparse(node.targets[0])
            ):
                found[ast.literal_eval(node.value.args[0])] = path
    return found


def test_every_file_of_a_rule_is_found_and_has_its_name() -> None:
    files = _files_of_rules()
    assert set(files) == set(RULES)
    assert {path.stem for path in files.values()} == {name.replace("-", "_") for name in RULES}


def test_every_rule_lies_in_a_family() -> None:
    assert {path.parent.parent for path in _files_of_rules().values()} == {FOLDER}
