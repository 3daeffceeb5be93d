# SPDX-License-Identifier: Apache-2.0
"""Kinds of operators, as `hardware.EFFICIENCIES` names them, told from their names."""

from __future__ import annotations

import re

# In this order: the first pattern that is found in a name decides.
_PATTERNS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("attention", r"attention|flash|sdpa"),
        ("convolution_backward", r"conv.*backward"),
        ("convolution", r"conv"),
        ("batchnorm", r"batch_norm"),
        ("safesoftmax", r"safe_softmax"),
        ("normalization", r"norm"),
        ("matmul", r"(^|[^a-z])(b?mm|baddbmm|addb?mm|matmul|linear|mv|dot|einsum)\b"),
        ("matmul", r"(^|_)(b?mm|linear)_"),
        ("recurrent", r"rnn|lstm|gru"),
        ("gather", r"embedding|index|gather|scatter|roll|sort|topk"),
        ("copy", r"copy|clone|contiguous|^cat|stack|_pad|fill|zero|ones|empty"),
        ("reduction", r"softmax|sum|mean|var|max|min|pool|loss|entropy|^any|^all"),
    )
)


def kind_of(name: str) -> str:
    """Tell the kind of an operator from its name, with or without a namespace."""
    short = name.rsplit("::", 1)[-1].lower()
    found = (kind for kind, pattern in _PATTERNS if pattern.search(short))
    return next(found, "elementwise")
