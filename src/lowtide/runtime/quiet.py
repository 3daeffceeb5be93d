"""Run torch operators unseen: below autograd, without modes, without autocast."""

from __future__ import annotations

from types import TracebackType

import torch


class Quiet:
    """A context in which lowtide's own operators neither record nor get recorded."""

    __slots__ = ("_guards",)

    def __enter__(self) -> None:
        """Enter the guards."""
        self._guards = (
            torch._C._DisableTorchDispatch(),  # type: ignore[attr-defined]
            torch._C._AutoDispatchBelowAutograd(),
            torch._C._DisableAutocast(),
        )
        for guard in self._guards:
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
