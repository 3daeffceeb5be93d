# SPDX-License-Identifier: Apache-2.0
"""Read and write numbers of bytes: "8 GiB" <-> 8589934592.

Binary and decimal units are told apart (1 GiB is 2**30 bytes, 1 GB is 10**9). A bare
letter is binary, as in `docker run --memory 8g` and `ulimit`. Arithmetic is exact:
"0.1GB" is 100,000,000 bytes and never one fewer.
"""

import operator
import re
from fractions import Fraction

from lowtide.errors import SizeError

_LIMIT_BYTES = 2**63  # sizes travel as 64-bit signed integers
_SIZE = re.compile(r"(?P<number>-?[0-9]{1,20}(?:\.[0-9]{1,20})?)\s*(?P<unit>[a-z]*|%)")
_LETTERS = "kmgtpe"

_BYTES_PER_UNIT: dict[str, int] = {"": 1, "b": 1, "byte": 1, "bytes": 1}
for _power, _letter in enumerate(_LETTERS, start=1):
    _BYTES_PER_UNIT[_letter] = _BYTES_PER_UNIT[_letter + "ib"] = 1024**_power
    _BYTES_PER_UNIT[_letter + "i"] = 1024**_power
    _BYTES_PER_UNIT[_letter + "b"] = 1000**_power


def parse_bytes(size: int | str, *, total: int | None = None) -> int:
    """Return the number of bytes that a size means.

    Arguments:
        size: bytes, or text such as "8GiB", "8GB", "512 MiB", "1.5g", "75%".
            Upper and lower case are the same; fractions of a byte are dropped.
        total: the bytes that a percentage is a part of.

    Raises:
        SizeError: the size is malformed, negative, too large, or a percentage
            where there is nothing to take a part of.
    """
    if isinstance(size, str):
        return _within_limit(size, _parse_text(size, total))
    if isinstance(size, bool):
        raise SizeError(size, "a truth value has no bytes")
    try:
        return _within_limit(size, operator.index(size))
    except TypeError:
        kind = type(size).__name__
        raise SizeError(size, f"it is a {kind}, not a whole number or text") from None


def format_bytes(n: int, *, round_up: bool = False) -> str:
    """Write a number of bytes for people, to three digits or so: "7.98 GiB".

    Arguments:
        n: the bytes.
        round_up: never write less than there is, for sizes that somebody may copy.
    """
    if abs(n) < 1024:
        return f"{n} B"
    for power, letter in enumerate(_LETTERS, start=1):
        unit = 1024**power
        value = n / unit
        if round_up:
            digits = 100 if abs(value) < 99.995 else 10
            value = -(-n * digits // unit) / digits
        text = f"{value:.2f}" if abs(value) < 99.995 else f"{value:.1f}"
        if abs(float(text)) < 1024 or letter == _LETTERS[-1]:
            break
    return f"{text} {letter.upper()}iB"


def format_apart(a: int, b: int) -> tuple[str, str]:
    """Write two numbers of bytes; in full where they differ and would look alike."""
    texts = format_bytes(a), format_bytes(b)
    if a != b and texts[0] == texts[1]:
        return f"{texts[0]} ({a:,} bytes)", f"{texts[1]} ({b:,} bytes)"
    return texts


def _parse_text(size: str, total: int | None) -> Fraction:
    size_alone = size.strip().lower()
    if not size_alone:
        raise SizeError(size, "it is empty")
    match = _SIZE.fullmatch(size_alone)
    if match is None:
        raise SizeError(size, "it is not a number followed by a unit")
    number, unit = Fraction(match["number"]), match["unit"]
    if unit == "%":
        return _part_of(size, number, total)
    if unit not in _BYTES_PER_UNIT:
        raise SizeError(size, f"the unit {unit!r} is unknown")
    if _BYTES_PER_UNIT[unit] == 1 and number.denominator != 1:
        raise SizeError(size, "without a unit it is in bytes, which are whole")
    return number * _BYTES_PER_UNIT[unit]


def _part_of(size: str, percent: Fraction, total: int | None) -> Fraction:
    if total is None:
        raise SizeError(size, "there is no total here to take a percentage of")
    if not 0 < percent <= 100:
        raise SizeError(size, "a percentage lies above 0 and not above 100")
    return percent * total / 100


def _within_limit(size: object, n_bytes: int | Fraction) -> int:
    if n_bytes < 0:
        raise SizeError(size, "it is negative")
    if n_bytes >= _LIMIT_BYTES:
        raise SizeError(size, "it is larger than any memory (8 EiB)")
    return int(n_bytes)
