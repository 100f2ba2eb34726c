"""Print a row of docs/versions.md from the results that pytest wrote as XML.

python tests/versions/row.py tests.xml truth.xml
"""

from __future__ import annotations

import datetime
import platform
import sys
from importlib import metadata
from xml.etree import ElementTree

COUNTS = ("tests", "failures", "errors", "skipped")


def main() -> None:
    total = dict.fromkeys(COUNTS, 0)
    for path in sys.argv[1:]:
        for suite in ElementTree.parse(path).getroot().iter("testsuite"):
            for name in COUNTS:
                total[name] += int(suite.get(name, 0))
    failed = total["failures"] + total["errors"]
    passed = total["tests"] - failed - total["skipped"]
    versions = [metadata.version("torch"), metadata.version("triton"), metadata.version("numpy")]
    cells = [*versions, platform.python_version(), f"{passed:,}", failed, total["skipped"], datetime.date.today()]
    print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
