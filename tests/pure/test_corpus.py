# SPDX-License-Identifier: Apache-2.0
"""200 damaged files: one clear line and status 2 each, and no pickle code runs."""

import pickle
from pathlib import Path

import pytest

from lowtide.archive import save
from lowtide.simulator.networks import make_chain
from tests.pure.foreign import mutate, snapshot, write_all
from tests.pure.test_cli_show import refusals

VERBS = {
    "show": (),
    "pool": (),
    "plan": ("--gpu", "h100"),
    "simulate": ("--gpu", "h100"),
}
WANTED = 200


def hostile(mark: Path) -> dict[str, bytes]:
    """Make pickles that would write a file, were they run."""

    class Harm:
        def __reduce__(self) -> tuple[object, tuple[str, str]]:
            return open, (str(mark), "w")

    return {
        f"hostile-{protocol}.pickle": pickle.dumps([snapshot(), Harm()], protocol)
        for protocol in (2, 3, 4, 5)
    }


def test_200_damaged_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each verb in turn; what is still a good file after its damage does not count."""
    mark = tmp_path / "harm"
    whole = {name: path.read_bytes() for name, path in write_all(tmp_path).items()}
    save(tmp_path / "step.tide", make_chain(3, mib=1))
    whole["step.tide"] = (tmp_path / "step.tide").read_bytes()
    whole |= hostile(mark)
    verbs = list(VERBS)
    refused = seed = 0
    while refused < WANTED:
        for name, content in whole.items():
            path = tmp_path / f"{seed}-{name}"
            harmed = content if name.startswith("hostile") else mutate(content, seed)
            path.write_bytes(harmed)
            verb = verbs[seed % len(verbs)]
            line = refusals(monkeypatch, capsys, verb, path, *VERBS[verb])
            refused += bool(line)
            if name.startswith("hostile"):
                assert "refused: it uses" in line
            path.unlink()
        seed += 1
        assert seed < WANTED
    assert not mark.exists()
    assert seed > len(VERBS)  # every verb has had its turn
