"""``python -m gradscope.cli``, for a checkout that is not installed."""

import sys

from gradscope.cli import main

if __name__ == "__main__":
    sys.exit(main())
