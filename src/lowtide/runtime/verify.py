"""Verify: every tensor that leaves must come back with the same bits.

In the first two iterations each released value's bytes are digested when they leave
and when they return. The rest of a step is PyTorch's own computation on the same
tensors, so equal saved tensors mean equal gradients.
"""

from __future__ import annotations

import hashlib

import torch

from lowtide.errors import LowtideError
from lowtide.recorder.key import quiet
from lowtide.recorder.values import Value, bytes_of


class Verifier:
    """Digests of the values that are away."""

    def __init__(self) -> None:
        self.checked = 0
        self.enabled = True
        self._digests: dict[int, bytes] = {}

    def leaving(self, value: Value) -> None:
        """Digest a value just before its memory goes."""
        storage = value.storage()
        if self.enabled and storage is not None:
            self._digests[id(value)] = _digest(storage)

    def returned(self, value: Value, tensor: torch.Tensor) -> None:
        """Compare a value that has just come back."""
        expected = self._digests.pop(id(value), None)
        if expected is None:
            return
        if _digest(tensor.untyped_storage()) != expected:
            way = "recomputed" if value.dropped else "swapped"
            made_by = value.op.facts.name if value.op is not None else "a source"
            raise LowtideError(
                f"verify: a {way} tensor of {value.nbytes} bytes made by {made_by} "
                "came back with other bits. Please report this; policy='swap-only' "
                "avoids recomputation meanwhile."
            )
        self.checked += 1


def _digest(storage: torch.UntypedStorage) -> bytes:
    with quiet():
        view = bytes_of(storage).cpu().numpy()
    return hashlib.blake2b(view.data, digest_size=16).digest()
