# SPDX-License-Identifier: Apache-2.0
"""Where the iterations of a running program begin and end, for a recording of one.

An optimizer's step ends an iteration; where a program has several that take turns, the
one that stepped last when the first one came round again. A program without optimizers
is cut where it saves its first tensor after a backward pass has used all there were.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide.recorder.graph import GraphListener, sequence_of
from lowtide.trace import Graph


class Recording(Protocol):
    """What records a part of a run (fakerun.FakeRun, graph.RealRun)."""

    def begin(self) -> GraphListener:
        """Begin to record, anew where something was being recorded."""

    def end(self) -> Graph:
        """Stop to record."""


class Enough(SystemExit):
    """Ends a program whose iteration has been recorded."""

    def __init__(self) -> None:
        super().__init__(0)


class Saves:
    """Tells the listener of the moment what autograd saves and asks back."""

    def __init__(self, tell_first: Callable[[], None] | None = None) -> None:
        self.listener: GraphListener | None = None
        self.held = 0  # saved tensors that autograd has now
        self.used = False  # it has asked for some since it had none
        self._tell_first = tell_first

    def __enter__(self) -> Saves:
        """Watch what autograd saves."""
        torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
        return self

    def __exit__(self, *_: object) -> None:
        """Watch no longer."""
        torch._C._autograd._pop_saved_tensors_default_hooks()

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        if self.held == 0 and self._tell_first is not None:
            self._tell_first()
        listener = self.listener
        if listener is None:
            return _Saved(self, None, (-1, tensor.detach()))
        return _Saved(self, listener, listener.pack(tensor))

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        self.used = True
        listener = self.listener
        if listener is None or saved.listener is not listener:
            return saved.saved[1]
        return listener.unpack(saved.saved)


class _Saved:
    """What autograd holds in place of a tensor."""

    __slots__ = ("listener", "saved", "saves")

    def __init__(
        self,
        saves: Saves,
        listener: GraphListener | None,
        saved: tuple[int, torch.Tensor],
    ) -> None:
        self.saves = saves
        self.listener = listener
        self.saved = saved
        saves.held += 1

    def __del__(self) -> None:
        self.saves.held -= 1


class Laps:
    """Records the iterations of a program until there are enough.

    Arguments:
        recording: what records.
        wanted: the iteration after which the program is ended.
    """

    def __init__(self, recording: Recording, wanted: int) -> None:
        self.recording = recording
        self.wanted = wanted
        self.finished = 0  # iterations
        self.graph: Graph | None = None  # the latest that was recorded whole
        self._round: list[int] = []  # optimizers, as they stepped
        self._closer: int | None = None  # the optimizer that ends an iteration
        self._saves = Saves(self._first_save)

    def __enter__(self) -> Laps:
        """Watch the program."""
        self._hook = register_optimizer_step_post_hook(self._stepped)
        self._saves.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the program alone."""
        self._saves.__exit__()
        self._hook.remove()
        if self._saves.listener is not None:
            self._saves.listener = None
            self.recording.end()

    def _begin(self) -> None:
        self._saves.listener = self.recording.begin()

    def _stepped(self, optimizer: Any, *_: object) -> None:
        """Note that an optimizer has stepped."""
        key = id(optimizer)
        if self._closer is None:
            if key not in self._round:
                self._round.append(key)
                self.finished = 1
                self._begin()  # again: the next may be the last of its round
                return
            self._closer = self._round[-1]
        if key == self._closer:
            self._lap()

    def _first_save(self) -> None:
        """Note that autograd saves something, having had nothing."""
        if not self._saves.used or self._round:
            return
        self._saves.used = False
        if any(issubclass(type(o), torch.optim.Optimizer) for o in gc.get_objects()):
            return  # it will step some time
        if self._saves.listener is None:
            self.finished = 1
            self._begin()
        else:
            self._lap()

    def _lap(self) -> None:
        """Keep what was recorded, and go on or end the program."""
        self.finished += 1
        self._saves.listener = None
        graph = self.recording.end()
        earlier, self.graph = self.graph, graph
        if earlier is not None and sequence_of(earlier) == sequence_of(graph):
            # other processes disturb the least seconds least
            seconds = graph.operators["seconds"]
            np.minimum(seconds, earlier.operators["seconds"], out=seconds)
        if self.finished >= self.wanted:
            raise Enough
        self._begin()
