# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import SizeError
from lowtide.units import format_bytes, parse_bytes

SIZES = st.integers(0, 2**63 - 1)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("0", 0),
        ("8589934592", 2**33),
        ("8GiB", 2**33),
        ("8gib", 2**33),
        (" 8 GiB ", 2**33),
        ("8GB", 8 * 10**9),
        ("8G", 2**33),
        ("8gi", 2**33),
        ("1.5g", 3 * 2**29),
        ("512 MiB", 2**29),
        ("512\tMiB", 2**29),
        ("0.1GB", 10**8),
        ("4096b", 4096),
        ("4096 bytes", 4096),
        ("3k", 3072),
        ("3kB", 3000),
        ("2TiB", 2**41),
    ],
)
def test_text_forms(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize(
    "bad",
    [
        "",
        " ",
        "GiB",
        "auto",
        "-1",
        "-1GiB",
        "- 1GiB",
        "8 Gigs",
        "8,5GiB",
        "1.5",
        "1.5 bytes",
        "1e9",
        "0x10",
        "nan",
        "inf",
        "8GiB 8GiB",
        ".5g",
        "1.g",
        "\N{ARABIC-INDIC DIGIT FOUR}",
        "9" * 25,
        "9EiB",
        "75%%",
        8e9,
        None,
        True,
        -1,
        2**63,
        b"8GiB",
    ],
)
def test_bad_sizes_show_the_right_form(bad: object) -> None:
    with pytest.raises(SizeError) as caught:
        parse_bytes(bad)  # type: ignore[arg-type]
    assert repr(bad) in str(caught.value)
    assert '"8GiB"' in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("bad", "why"),
    [("", "empty"), (" ", "empty"), ("-1", "negative"), ("-5MB", "negative")],
)
def test_bad_sizes_get_a_fitting_reason(bad: str, why: str) -> None:
    with pytest.raises(SizeError, match=f"it is {why}"):
        parse_bytes(bad)


@pytest.mark.parametrize(
    ("text", "total", "n_bytes"),
    [("75%", 1000, 750), ("100 %", 2**40, 2**40), ("0.5%", 1000, 5), ("33%", 10, 3)],
)
def test_percentages(text: str, total: int, n_bytes: int) -> None:
    assert parse_bytes(text, total=total) == n_bytes


@pytest.mark.parametrize("text", ["0%", "101%", "-5%"])
def test_percentages_outside_the_whole(text: str) -> None:
    with pytest.raises(SizeError):
        parse_bytes(text, total=1000)


def test_percentage_of_nothing() -> None:
    with pytest.raises(SizeError, match="no total"):
        parse_bytes("75%")


def test_numpy_integers_are_whole_numbers() -> None:
    n_bytes = parse_bytes(np.int64(12))  # type: ignore[arg-type]
    assert n_bytes == 12
    assert type(n_bytes) is int


@given(SIZES)
def test_bare_digits_are_bytes(n: int) -> None:
    assert parse_bytes(str(n)) == parse_bytes(n) == n


@given(SIZES)
def test_formatted_sizes_parse_to_nearly_the_same(n: int) -> None:
    text = format_bytes(n)
    assert len(text) <= 11
    if not text.startswith("8.00 EiB"):  # rounded up to the first size refused
        assert abs(parse_bytes(text) - n) <= 0.005 * n


@given(SIZES)
def test_sizes_rounded_up_suffice_and_by_little(n: int) -> None:
    text = format_bytes(n, round_up=True)
    assert len(text) <= 11
    if not text.startswith("8.00 EiB"):  # the first size refused
        assert n <= parse_bytes(text) <= 1.011 * n


@given(SIZES, SIZES)
def test_formatting_never_turns_an_order_round(a: int, b: int) -> None:
    low, high = sorted((a, b))
    texts = [format_bytes(low), format_bytes(high)]
    if "8.00 EiB" not in texts:
        assert parse_bytes(texts[0]) <= parse_bytes(texts[1])


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (8568456970, "7.98 GiB"),
        (100 * 2**20, "100.0 MiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_format(n: int, text: str) -> None:
    assert format_bytes(n) == text
