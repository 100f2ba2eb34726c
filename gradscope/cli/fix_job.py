"""One run of a training script for ``gradscope fix``, as a program: ``python -m gradscope.cli.fix_job JOB``."""

from __future__ import annotations

import sys

from gradscope.cli.failure import INTERRUPTED, say, say_error, show_user_error
from gradscope.cli.progress import make_progress
from gradscope.errors import GradscopeError
from gradscope.process import leave_all_the_same


def main(path: str) -> int:
    """Do the job at ``path`` and return the exit code."""
    try:
        # Not above: whoever presses Ctrl-C while this loads torch gets no traceback either.
        from gradscope.fixing.jobs import Job, run_job

        job = Job.load(path)
        run_job(job, make_progress(quiet=job.quiet, live=False))
    except GradscopeError as error:
        say_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:  # the process that waits says so
        return INTERRUPTED
    except BaseException as error:
        return show_user_error(error) or 1
    return 0


if __name__ == "__main__":
    ended = main(sys.argv[1])
    leave_all_the_same(ended, say)
    sys.exit(ended)
