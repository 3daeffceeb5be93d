# SPDX-License-Identifier: Apache-2.0
"""Errors that say what happened, why, and what to do, with the numbers as fields."""

import os
from errno import EDQUOT, EFBIG, ENOSPC, EROFS

SIZE_FORMS = '8589934592 (bytes), "8GiB", "8GB", "512 MiB" or "75%"'

_NO_ROOM = frozenset({ENOSPC, EDQUOT, EFBIG, EROFS})


class LowtideError(Exception):
    """Be the base of every error that lowtide raises on purpose."""


class SizeError(LowtideError, ValueError):
    """Refuse something that is not a number of bytes.

    Arguments:
        size: what was given.
        why: a clause that says what is wrong with it.
    """

    def __init__(self, size: object, why: str) -> None:
        super().__init__(
            f"{size!r} is not a usable size: {why}. Give a size like {SIZE_FORMS}."
        )
        self.size = size
        self.why = why

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (type(self), (self.size, self.why), {})


class BudgetError(LowtideError, RuntimeError):
    """Report that a program cannot run within its budget.

    While the first two steps are being learnt, a budget that turns out to be too small
    is exceeded on purpose, and a logged warning says so at that moment: only what was
    measured to the end of these steps, or of the program, shows the smallest budget
    that works, which this error then names. Once they are learnt, an operator that
    cannot fit raises this error before it runs.

    Arguments:
        budget_bytes: the budget that was asked for.
        operator: the operator that does not fit, as the user would find it.
        needed_bytes: what must be present at once while it runs.
        smallest_bytes: the smallest budget that is known to work; None while
            that is unknown, because the iteration did not get far enough.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        operator: str,
        needed_bytes: int,
        smallest_bytes: int | None = None,
    ) -> None:
        super().__init__(
            f"a budget of {_both(budget_bytes)} is not enough: {operator} needs "
            f"{_both(needed_bytes)} at once, counting what cannot leave memory "
            f"while it runs. {_advice(needed_bytes, smallest_bytes)}"
        )
        self.budget_bytes = budget_bytes
        self.operator = operator
        self.needed_bytes = needed_bytes
        self.smallest_bytes = smallest_bytes

    def __reduce__(self) -> tuple[object, ...]:
        fields = ("budget_bytes", "operator", "needed_bytes", "smallest_bytes")
        return _again, (type(self), (), {name: getattr(self, name) for name in fields})


class SpillError(LowtideError):
    """Report that the spill file could not be written or read.

    The fields `errno`, `strerror` and `filename` mean what they mean in `OSError`.

    Arguments:
        action: what was being done, e.g. "writing 64.00 MiB to the spill file".
        errno: the system's error number, where there is one.
        filename: the spill directory or file.
        asked_bytes, used_bytes, allowed_bytes: where the limit on the spill file was
            in the way, what would have been added to what it holds, and that limit.
        limit: the name of that limit: "disk", "host" or "disk_writes".
    """

    def __init__(
        self,
        action: str,
        *,
        errno: int | None = None,
        filename: str | None = None,
        asked_bytes: int | None = None,
        used_bytes: int = 0,
        allowed_bytes: int = 0,
        limit: str = "disk",
    ) -> None:
        self.action = action
        self.errno = errno
        self.strerror = None if errno is None else os.strerror(errno)
        self.filename = filename
        self.asked_bytes = asked_bytes
        self.used_bytes = used_bytes
        self.allowed_bytes = allowed_bytes
        self.limit = limit
        place = "" if filename is None else f" in {filename}"
        reason = "" if self.strerror is None else f": {self.strerror}"
        cure = ""
        if limit != "host":
            cure = "Free space there or name" if errno in _NO_ROOM else "Name"
            cure += (
                " another directory on a local disk with spill_dir=, --spill-dir or "
                "LOWTIDE_SPILL_DIR."
            )
        if asked_bytes is not None:
            per = " a step" if limit == "disk_writes" else ""
            reason = (
                f": {_both(asked_bytes)} were asked for, but {_both(used_bytes)} of "
                f"the {_both(allowed_bytes)} allowed{per} are in use"
            )
            cure = f"Allow more with {limit}=, or give a larger budget."
        super().__init__(f"{action} failed{place}{reason}. {cure}".rstrip())

    def __reduce__(self) -> tuple[object, ...]:
        sizes = ("asked_bytes", "used_bytes", "allowed_bytes")
        names = ("errno", "filename", *sizes, "limit")
        fields = {name: getattr(self, name) for name in names}
        return _again, (type(self), (self.action,), fields)


class FileError(LowtideError, ValueError):
    """Refuse a file that cannot be read as what it is said or seems to be.

    Arguments:
        why: a clause that says what is wrong with it.
        path: the file, where it is known.
    """

    def __init__(self, why: str, *, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(why if path is None else f"{os.fspath(path)} {why}")
        self.why = why
        self.path = None if path is None else os.fspath(path)

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (type(self), (self.why,), {"path": self.path})


def _advice(needed_bytes: int, smallest_bytes: int | None) -> str:
    if smallest_bytes is None:
        return (
            f"Give {_both(needed_bytes)} or more (the rest of the iteration has not "
            "been seen yet and may need more), or lower the batch size."
        )
    return (
        f"The smallest budget that works is {_both(smallest_bytes)}: give that or "
        "more, or lower the batch size."
    )


def _both(n_bytes: int) -> str:
    """Write bytes so that either form can be pasted: MiB are rounded up, to suffice."""
    tenths = -(-n_bytes * 10 // 2**20)
    return f"{tenths // 10}.{tenths % 10} MiB ({n_bytes} bytes)"


def _again(
    kind: type[LowtideError], values: tuple[object, ...], named: dict[str, object]
) -> LowtideError:
    """Build an error anew from its fields, so that it survives pickling."""
    return kind(*values, **named)
