# SPDX-License-Identifier: Apache-2.0
"""Files that this torch itself writes, and this machine as torch measures it."""

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lowtide.hardware import EFFICIENCIES, load_measured, save_measured
from lowtide.recorder.files import read_history
from lowtide.runtime import kinds, overheads, speed


def write_profile(path: Path, steps: int) -> int:
    """Profile a small model; return the bytes of its largest activation."""
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(512, 64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(steps):
            optimizer.zero_grad()
            model(data).sum().backward()
            optimizer.step()
    profiler.export_chrome_trace(str(path))
    return data.nbytes


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_profile_of_this_torch(tmp_path: Path, name: str) -> None:
    largest = write_profile(tmp_path / name, steps=3)
    history = read_history(tmp_path / name)
    assert history.device == "cpu"
    assert history.steps == 3
    assert history.blocks["bytes"].max() == largest
    assert 4 * largest < history.peak_bytes < 8 * largest
    named = {history.name_of(i) for i in range(len(history.blocks))}
    assert "aten::addmm" in named
    assert "AddmmBackward0" in {history.names[i] for i in history.ops["name"]}
    assert (history.ops["seconds"] >= 0).all()
    assert history.ops["seconds"].sum() > 0
    assert (history.starts < history.stops).all()


def test_this_machine_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "_MATMUL_SIZE", {"float32": 64, "float64": 64})
    monkeypatch.setattr(speed, "_STREAM_ELEMENTS", 1 << 16)
    monkeypatch.setattr(speed, "_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(kinds, "_ELEMENTS", (1 << 12, 1 << 14))
    monkeypatch.setattr(overheads, "_CASES", ((overheads._updates, 20, 0.9),))
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))
    said: list[str] = []
    hardware = speed.measure_machine(said.append)
    assert hardware.name == "this-machine"
    assert min(hardware.flops.values()) > 0
    assert hardware.to_host == hardware.disk_write > 0
    assert hardware.seconds(1e6, 1e6, "float32", next(iter(EFFICIENCIES))) > 0
    assert len(said) == 6
    assert hardware.overheads.call > 0
    assert {row.kind for row in kinds.measure_kinds()} < set(EFFICIENCIES)
    save_measured(hardware)
    assert load_measured() == hardware
