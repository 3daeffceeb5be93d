"""Pins: what dropped values are made from stays, until they are back.

A dropped value pins its parents, and where these are not sources themselves, theirs.
The bytes of a pinned source are held, unless a copy on a lower tier has them.
"""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.recorder.key import quiet
from lowtide.recorder.values import Value, bytes_of


def pin_parents(value: Value) -> list[Value]:
    """Keep what a value that is about to be dropped is made from.

    Returns the sources whose bytes are held for it from now on.
    """
    held = []
    stack = [value]
    while stack:
        op = stack.pop().op
        if op is None:
            continue
        for parent in op.inputs:
            parent.pins += 1
            if parent.pins > 1:
                continue
            if parent.op is not None:
                stack.append(parent)
            elif not parent.clean:
                storage = parent.storage()
                assert storage is not None
                with quiet():
                    parent.hold = bytes_of(storage)
                held.append(parent)
    return held


def unpin_parents(value: Value) -> Iterator[Value]:
    """Let go of what a value was made from; yields sources that nothing pins now."""
    stack = [value]
    while stack:
        op = stack.pop().op
        if op is None:
            continue
        for parent in op.inputs:
            parent.pins -= 1
            if parent.pins > 0:
                continue
            if parent.op is not None:
                stack.append(parent)
                continue
            parent.hold = None
            yield parent


def hold_old_bytes(value: Value) -> None:
    """Copy the bytes that dropped values start from, before they are overwritten."""
    if not value.pins or value.op is not None or value.base is not None:
        return
    storage = value.storage()
    shared = value.reference is not None and storage is value.reference()
    if storage is not None and shared:
        with quiet():
            value.hold = bytes_of(storage).clone()


def spoil_unpacked(value: Value) -> None:
    """Note that what was unpacked of a value is about to be overwritten."""
    if value.base is None:
        return
    for saved in list(value.saved.values()):
        if saved.alias is None:
            saved.spoiled = "was modified in place after it had been unpacked"
    value.base = None
