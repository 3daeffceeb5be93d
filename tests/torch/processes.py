# SPDX-License-Identifier: Apache-2.0
"""Scripts in processes of their own, where no allocator is installed yet."""

import os
import subprocess
import sys
import textwrap


def succeeds(script: str, *arguments: str, **environment: str) -> str:
    """Run a script that must end well; return what it wrote to both outputs."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
