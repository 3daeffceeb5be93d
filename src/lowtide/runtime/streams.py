# SPDX-License-Identifier: Apache-2.0
"""Streams: what is needed where a program computes on several of them at once.

Autograd keeps what it has saved until backward is done with it, so a program need not
tell torch's allocator of every stream that reads a saved tensor, nor order streams that
only share one. lowtide lets go earlier, and makes tensors again on whatever stream is
current. So copies wait for all streams, what is made again is waited for by those that
did not make it, and the allocator hears of all before memory goes: it may be given
away again only once each of them is done. All of this waits on the device, never on the
host. While a program uses one stream only, as most do, nothing of it is needed.

While a CUDA graph is captured nothing may be waited for, and what is called does not
run: it is left alone, and so is what is saved meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.recorder.key import quiet
from lowtide.recorder.values import bytes_of
from lowtide.runtime.hostjobs import Event


class Streams:
    """The streams of one device on which a program was seen to compute."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._torch: Any = torch.get_device_module(self._device)
        self._seen: dict[Any, None] = {}
        self.capturing: Callable[[], bool] = getattr(
            self._torch, "is_current_stream_capturing", lambda: False
        )

    def look(self) -> Any:
        """Note, and return, the calling thread's current stream.

        It is asked for each time, since it may have changed.
        """
        stream = self._torch.current_stream(self._device)
        if stream not in self._seen:
            self._seen[stream] = None
        return stream

    def ready(self) -> list[Event]:
        """Mark what was queued so far, on each stream that was seen."""
        self.look()
        return [stream.record_event() for stream in list(self._seen)]

    def join(self) -> None:
        """Let the current stream wait for what all others have queued so far."""
        now = self.look()
        for stream in list(self._seen):
            if stream != now:
                now.wait_stream(stream)

    def keep(self, storage: torch.UntypedStorage) -> None:
        """Have memory that is about to go stay until every stream is done with it."""
        if len(self._seen) < 2:
            return
        with quiet():
            tensor = bytes_of(storage)
            for stream in list(self._seen):
                tensor.record_stream(stream)

    def hand_over(self, storage: torch.UntypedStorage) -> None:
        """Make memory that lowtide has filled safe to use on the current stream."""
        self.join()
        self.keep(storage)


def streams_of(device: str) -> Streams | None:
    """Watch a device's streams; None for the CPU, which has none."""
    return None if device == "cpu" else Streams(device)
