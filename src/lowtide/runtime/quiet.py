"""Run torch operators unseen: below autograd, without modes, without autocast."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from lowtide.recorder.key import KEY

_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


class Quiet:
    """A context in which lowtide's own operators neither record nor get recorded."""

    __slots__ = ("_excluded", "_guards")

    def __enter__(self) -> None:
        """Enter the guards."""
        self._excluded = _is_excluded(KEY)
        _exclude(KEY, True)
        guards: list[Any] = [
            torch._C._DisableTorchDispatch(),
            torch._C._AutoDispatchBelowAutograd(),
            torch._C._DisableAutocast(),
        ]
        self._guards = guards
        for guard in guards:
            guard.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the guards, innermost first."""
        for guard in reversed(self._guards):
            guard.__exit__(kind, error, trace)
        _exclude(KEY, self._excluded)
