# SPDX-License-Identifier: Apache-2.0
"""The program `lowtide`, and `python -m lowtide`; Ctrl-C ends its imports too."""

import os
import signal
import sys


def main() -> int:
    """Load the command line and run it; return the exit status."""
    try:
        from lowtide.cli import main as command_line
    except KeyboardInterrupt:  # nothing of the user's has begun: no traceback of ours
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # die of it, as shells expect
        raise
    return command_line()


if __name__ == "__main__":
    sys.exit(main())
