# SPDX-License-Identifier: Apache-2.0
import copy
import errno
import pickle

import pytest

from lowtide.errors import BudgetError, LowtideError, SizeError, SpillError
from lowtide.units import parse_bytes

ERRORS = [
    SizeError("8 Gigs", "the unit 'gigs' is unknown"),
    BudgetError(
        budget_bytes=2**32,
        operator="aten::convolution_backward (layer4.2.conv1)",
        needed_bytes=5 * 2**30,
        smallest_bytes=6 * 2**30,
    ),
    BudgetError(budget_bytes=1, operator="aten::mm", needed_bytes=2),
    SpillError("writing 4096 bytes", errno=errno.ENOSPC, filename="/var/tmp"),
    SpillError("reading 4096 bytes"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_errors_survive_pickle_and_copy(error: LowtideError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_every_error_is_a_lowtide_error(error: LowtideError) -> None:
    assert isinstance(error, LowtideError)


def test_budget_error_carries_its_numbers_exactly() -> None:
    error = ERRORS[1]
    assert isinstance(error, BudgetError)
    assert isinstance(error, RuntimeError)
    assert error.budget_bytes == 2**32
    assert error.smallest_bytes == 6 * 2**30
    message = str(error)
    for part in ("layer4.2.conv1", str(5 * 2**30), "budget that works is 6144.0 MiB"):
        assert part in message
    assert str(error.smallest_bytes) in message


@pytest.mark.parametrize(
    ("n_bytes", "short"),
    [(134581302, "128.4 MiB"), (2**27, "128.0 MiB"), (2**27 + 1, "128.1 MiB")],
)
def test_budget_error_never_names_too_little(n_bytes: int, short: str) -> None:
    error = BudgetError(
        budget_bytes=1, operator="aten::mm", needed_bytes=2, smallest_bytes=n_bytes
    )
    assert f"that works is {short} ({n_bytes} bytes)" in str(error)
    assert parse_bytes(short) >= n_bytes


def test_budget_error_admits_what_it_does_not_know() -> None:
    assert "has not been seen yet" in str(ERRORS[2])


def test_spill_error_tells_a_full_disk_from_a_broken_one() -> None:
    full, broken = ERRORS[3], ERRORS[4]
    assert isinstance(full, SpillError)
    assert full.errno == errno.ENOSPC
    assert full.filename == "/var/tmp"
    assert "Free space" in str(full)
    assert "Free space" not in str(broken)
    assert "--spill-dir" in str(broken)
