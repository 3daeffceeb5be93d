# SPDX-License-Identifier: Apache-2.0
"""Make `python -m lowtide` the same as `lowtide`."""

import sys

from lowtide.cli import main

if __name__ == "__main__":
    sys.exit(main())
