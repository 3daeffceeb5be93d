# SPDX-License-Identifier: Apache-2.0
"""How the table of predictions is judged."""

from benchmarks.predict import judge_peaks, judge_slowdowns


def row(predicted: int, measured: int, seconds: tuple[float, float]) -> dict:
    return {
        "predicted_peak_bytes": predicted,
        "measured_peak_bytes": measured,
        "predicted_seconds": seconds[0],
        "measured_seconds": seconds[1],
    }


def test_peaks_and_ranks_are_summed_up() -> None:
    rows = [row(101, 100, (1, 10)), row(95, 100, (2, 30)), row(100, 100, (3, 20))]
    said = judge_peaks(rows)
    assert "median error 1.00%" in said
    assert "largest 5.00%" in said
    assert "rank correlation 0.500" in said


def test_slowdowns_agree_where_neither_fits() -> None:
    pairs = [(1.0, 1.05), (1.2, 1.5), (None, None), (None, 2.0)]
    rows = [{"predicted_slowdown": p, "measured_slowdown": m} for p, m in pairs]
    said = judge_slowdowns(rows)
    assert "2 of 4 within 0.1" in said
    assert "1 fit in neither" in said
