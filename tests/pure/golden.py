# SPDX-License-Identifier: Apache-2.0
"""Compare output with tests/golden; LOWTIDE_RENEW_GOLDEN=1 writes it anew."""

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "golden"


def check_golden(name: str, text: str) -> None:
    """Fail unless a text is what was committed under this name."""
    path = FOLDER / name
    if os.environ.get("LOWTIDE_RENEW_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
