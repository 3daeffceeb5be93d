"""Saved-tensor hooks: what autograd keeps goes through here.

Pack returns a handle, never the tensor; unpack may come any number of times, in any
order, or never. PyTorch turns its own version check off under hooks, so it is done
here, with PyTorch's error. Tensors that values cannot describe (subclasses, sparse,
quantized, other devices) are kept whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide.errors import LowtideError
from lowtide.recorder.dispatch import is_plain
from lowtide.recorder.key import quiet
from lowtide.recorder.values import Handle, Saved, tensor_over

if TYPE_CHECKING:
    from lowtide.runtime.session import Session

_NO_HINT = (
    "Hint: the backtrace further above shows the operation that failed to compute its "
    "gradient. The variable in question was changed in there or anywhere later."
)


class KeptWhole:
    """A saved tensor that stays as it is."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = None if tensor.is_inference() else tensor._version


class Hooks:
    """The pair of hooks of one session."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def pack(self, tensor: torch.Tensor) -> Any:
        """Take a tensor that autograd wants to keep; return what it keeps instead."""
        session = self.session
        captured = session.recorder.captured
        if captured is not None and captured():
            return KeptWhole(tensor.detach())
        if not session.live or not is_plain(tensor, session.device_type):
            if session.live:
                session.account.kept_whole(tensor)
            return KeptWhole(tensor.detach())
        resting = session.recorder.resting is not None
        value = (session.rest if resting else session.table).value_of(tensor)
        # the tensor itself would make a cycle with its own node, and hide a holder
        with quiet():
            alias = tensor.detach()
        saved = Saved(alias, tensor._version)
        first = not value.saved and value.ledger is not session.ledger
        value.saved[id(saved)] = saved
        if first or value not in session.ledger.alive:
            session.note_saved(value)
        return Handle(value, saved)

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor that was packed, bit for bit."""
        if isinstance(packed, KeptWhole):
            tensor = packed.tensor
            if packed.version is not None and tensor._version != packed.version:
                raise RuntimeError(_modified(tensor, tensor._version, packed.version))
            return tensor
        saved: Saved = packed.saved
        resting = self.session.recorder.resting is not None
        if not resting:
            self.session.note_use(packed.value)
            self.session.scheduler.touched(packed.value)
        alias = saved.alias
        if alias is None:
            return self._return(packed)
        if alias._version != saved.version:
            raise RuntimeError(_modified(alias, alias._version, saved.version))
        if resting:
            return alias
        with quiet():  # what is in use shows as held by a tensor of its own
            return alias.detach()

    def _return(self, handle: Handle) -> torch.Tensor:
        value, saved = handle.value, handle.saved
        if saved.spoiled is not None:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been "
                f"modified by an inplace operation: a saved tensor {saved.spoiled}. "
                + _NO_HINT
            )
        if value.dropped and not self.session.live:
            raise LowtideError(
                "this graph was built under a budget that ended with an exception, and "
                "some of its tensors were to be computed again: run forward again."
            )
        streams = self.session.ledger.streams
        if streams is not None:
            streams.look()
        self.session.ledger.bring_back(value)
        storage = value.storage()
        assert storage is not None, "a saved tensor has no bytes"
        assert saved.geometry is not None
        if streams is not None:
            streams.hand_over(storage)
        with quiet():
            return tensor_over(storage, saved.geometry)


def _modified(tensor: torch.Tensor, version: int, expected: int) -> str:
    """PyTorch's own words for a saved tensor changed in place."""
    return (
        "one of the variables needed for gradient computation has been modified by an "
        f"inplace operation: [{tensor.type()} {list(tensor.shape)}] is at version "
        f"{version}; expected version {expected} instead. {_NO_HINT}"
    )
