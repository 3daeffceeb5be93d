# SPDX-License-Identifier: Apache-2.0
"""Take lowtide's own frames out of the tracebacks that a program's author reads."""

import os
from pathlib import Path
from types import TracebackType

from lowtide.errors import LowtideError

SHOW_ALL = "LOWTIDE_TRACEBACK"  # set: nothing is taken out
_PACKAGE = str(Path(__file__).parent) + os.sep


def hide_frames(error: BaseException, *, keep_own_errors: bool = True) -> None:
    """Take lowtide's frames out of the tracebacks of an error and of its causes.

    lowtide stands between a program and the operators that it calls; what the reader
    wants to see is the line of the program. `LOWTIDE_TRACEBACK=1` leaves all in, and
    so does an error that looks like a fault of lowtide: there they are the evidence.
    """
    if os.environ.get(SHOW_ALL):
        return
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        current = todo.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        todo += [current.__cause__, current.__context__]
        todo += getattr(current, "exceptions", ())
        if not (keep_own_errors and _is_our_fault(current)):
            current.__traceback__ = _without_ours(current.__traceback__)


def _is_our_fault(error: BaseException) -> bool:
    """Tell errors that lowtide raises on purpose from those that befall it.

    It raises its own kinds, and RuntimeError where PyTorch itself would. Ctrl-C may
    come at any moment.
    """
    if isinstance(error, (LowtideError, RuntimeError, KeyboardInterrupt)):
        return False
    last, traceback = None, error.__traceback__
    while traceback is not None:
        last, traceback = traceback, traceback.tb_next
    return last is not None and _file(last).startswith(_PACKAGE)


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    after_ours = False
    while traceback is not None:
        file = _file(traceback)
        is_ours = file.startswith(_PACKAGE)
        # An operator called by our dispatch mode shows torch's caller of operators,
        # which is not there when the program calls it directly.
        is_call = after_ours and file.endswith(os.path.join("torch", "_ops.py"))
        if not is_ours and not is_call:
            kept.append(traceback)
        after_ours = is_ours
        traceback = traceback.tb_next
    following = None
    for frame in reversed(kept):
        frame.tb_next = following
        following = frame
    return following


def _file(traceback: TracebackType) -> str:
    return traceback.tb_frame.f_code.co_filename
