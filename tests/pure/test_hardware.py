# SPDX-License-Identifier: Apache-2.0
"""The catalogue of devices, and the time of an operator on one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import LowtideError
from lowtide.hardware import (
    CATALOGUE,
    EFFICIENCIES,
    GIB,
    Hardware,
    Measured,
    Overheads,
    describe,
    find_hardware,
    load_measured,
    save_measured,
)

WANTED = (
    "gtx1080ti titanv v100-16g v100-32g t4 rtx3090 rtx4090 rtx5090 a10g a100-40g "
    "a100-80g l40s h100 h200 mi300x"
)
cards = st.sampled_from(list(CATALOGUE.values()))
kinds = st.sampled_from(list(EFFICIENCIES))
amounts = st.floats(0, 1e15)


def test_every_card_is_there_with_its_source() -> None:
    assert list(CATALOGUE) == WANTED.split()
    for card in CATALOGUE.values():
        assert card.source
        assert "float32" in card.flops
        assert 10 * GIB < card.memory_bytes <= 192 * GIB
        assert card.to_host < card.memory_bandwidth
        assert card.flops["float16"] >= card.flops["float32"]


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("RTX 4090", "rtx4090"),
        ("nvidia-geforce-rtx-3090", "rtx3090"),
        ("v100_16G", "v100-16g"),
        ("Tesla V100 32GB", "v100-32g"),
        ("A100 80GiB", "a100-80g"),
        ("gtx 1080 ti", "gtx1080ti"),
        ("Instinct MI300X", "mi300x"),
    ],
)
def test_names_are_found_however_spelled(name: str, card: str) -> None:
    assert find_hardware(name).name == card


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("v100", "'v100' may mean: v100-16g, v100-32g"),
        ("voodoo2", "'voodoo2' is no device that lowtide knows. It knows: gtx1080ti"),
        ("", "'' is no device"),
    ],
)
def test_unknown_names_are_refused(name: str, why: str) -> None:
    with pytest.raises(LowtideError, match=why):
        find_hardware(name)


def test_a_roofline() -> None:
    card = CATALOGUE["a100-80g"]
    product = card.seconds(312e12, 1e6, "float16", "matmul")
    assert product == pytest.approx(1 / EFFICIENCIES["matmul"].arithmetic, rel=1e-3)
    sweep = card.seconds(1e6, 2039e9, "float32", "elementwise")
    assert sweep == pytest.approx(1 / EFFICIENCIES["elementwise"].traffic, rel=1e-3)
    assert card.seconds(0, 0) == card.launch
    assert card.seconds(1e12, 0, kind="unheard of") == card.seconds(1e12, 0)


@given(cards, amounts, amounts, amounts, kinds)
def test_more_work_never_takes_less(
    card: Hardware, flops: float, n_bytes: float, more: float, kind: str
) -> None:
    time = card.seconds(flops, n_bytes, "float32", kind)
    assert time >= card.launch
    assert card.seconds(flops + more, n_bytes, "float32", kind) >= time
    assert card.seconds(flops, n_bytes + more, "float32", kind) >= time
    assert card.scaled(flops=1.2).seconds(flops, n_bytes, "float32", kind) <= time


def test_a_type_without_a_rate_takes_the_next_wider() -> None:
    old = CATALOGUE["gtx1080ti"]
    assert old.peak("bfloat16") == old.peak("float16")
    assert CATALOGUE["v100-16g"].peak("tf32") == CATALOGUE["v100-16g"].peak("float32")
    with pytest.raises(LowtideError, match="gtx1080ti has no FLOP/s for 'int4'"):
        old.peak("int4")


def test_scaling() -> None:
    card = CATALOGUE["t4"].scaled(flops=0.8, link=1.2)
    assert card.peak("float32") == pytest.approx(0.8 * 8.1e12)
    assert card.to_host == card.from_host == pytest.approx(14.4e9)
    assert card.memory_bandwidth == CATALOGUE["t4"].memory_bandwidth


def test_calibration_takes_the_median_of_what_binds() -> None:
    card = CATALOGUE["t4"]
    rows = [Measured("matmul", 8.1e12, 1e6, "float32", s) for s in (2.0, 2.5, 50.0)]
    rows += [Measured("copy", 0, 320e9, "float32", 4.0)]
    rows += [Measured("copy", 0, 1, "float32", card.launch)]  # says nothing
    changed = card.calibrated(rows).efficiencies
    assert changed["matmul"].arithmetic == pytest.approx(0.4, rel=1e-4)
    assert changed["matmul"].traffic == EFFICIENCIES["matmul"].traffic
    assert changed["copy"].traffic == pytest.approx(0.25, rel=1e-4)
    assert changed["gather"] == EFFICIENCIES["gather"]


def test_what_was_measured_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(LowtideError, match=r"has not been measured .*lowtide measure"):
        find_hardware("this machine")
    measured = replace(CATALOGUE["t4"], overheads=Overheads(call=1e-6, move=2e-4))
    path = save_measured(measured)
    assert path == tmp_path / "cache" / "hardware.json"
    assert find_hardware("this-machine") == measured
    assert [p.name for p in path.parent.iterdir()] == ["hardware.json"]


@pytest.mark.parametrize(
    "change",
    [
        {"launch": -1},
        {"launch": "x"},
        {"flops": 3},
        {"flops": {"float32": 0}},
        {"name": 3},
        {"efficiencies": {"matmul": {"traffic": 1}}},
        {"more": 1},
        {"overheads": {"call": -1}},
        {"overheads": {"call": "x"}},
        {"overheads": {"calls": 1e-6}},
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = save_measured(CATALOGUE["t4"], tmp_path / "hardware.json")
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **change}))
    with pytest.raises(LowtideError, match=f"{path} is damaged"):
        load_measured(path)
    for text in ("", "[]", "{}", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(LowtideError, match="is damaged"):
            load_measured(path)


def test_keeping_a_budget_costs_what_its_parts_cost() -> None:
    costs = Overheads(watch=1e-5, save=1e-4, move=1e-3, moved_byte=1e-9)
    assert costs.keeping(100, 10) == pytest.approx(2e-3)
    assert costs.keeping(100, 10, 3, 10**6) == pytest.approx(6e-3)


def test_a_device_is_described() -> None:
    text = describe(CATALOGUE["v100-16g"])
    assert text.startswith("v100-16g: 16.00 GiB of memory at 900 GB/s\n")
    assert "float16 125" in text
    assert "NVIDIA V100 datasheet" in text
