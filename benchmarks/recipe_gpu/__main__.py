"""``python benchmarks/recipe_gpu``: see command.py."""

import sys
from pathlib import Path

# The modules are those of the package, not of this folder; the benchmarks beside it share _common.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipe_gpu.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
