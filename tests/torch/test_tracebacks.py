# SPDX-License-Identifier: Apache-2.0
"""What a program sees of an error that leaves its `with lowtide.budget(...)`."""

import traceback

import pytest
import torch
from torch import nn

import lowtide

OURS = lowtide.__file__.removesuffix("__init__.py")


def fails() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(9, 9))
    with lowtide.budget("1GiB"):
        net(torch.ones(2, 8)).sum().backward()


def fails_in_backward() -> None:
    x = torch.ones(3, requires_grad=True)
    with lowtide.budget("1GiB"):
        y = x.exp()
        y.add_(1)
        y.sum().backward()


@pytest.mark.parametrize("program", [fails, fails_in_backward])
def test_it_shows_the_lines_of_the_program_only(
    program: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(program)
    with pytest.raises(RuntimeError) as caught:
        program()
    files = [
        frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)
    ]
    assert __file__ in files
    assert not [file for file in files if file.startswith(OURS)]
    monkeypatch.setenv("LOWTIDE_TRACEBACK", "1")
    with pytest.raises(RuntimeError) as caught:
        program()
    files = [
        frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)
    ]
    assert [file for file in files if file.startswith(OURS)]
