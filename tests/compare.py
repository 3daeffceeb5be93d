"""Compare two runs bit for bit.

Two tensors are equal when type, shape, layout and every bit of every element are: a
NaN equals a NaN with the same bits and 0.0 differs from -0.0. Small results are kept
and compared; large ones leave only a digest, so that comparing takes no memory.
"""

import hashlib
import pickle
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Digests = dict[str, str]


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """Split a tensor into the plain dense tensors that define it."""
    tensor = tensor.detach()
    layout = tensor.layout
    if tensor.is_nested:
        return [part for piece in tensor.unbind() for part in dense_parts(piece)]
    if layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.is_quantized:
        return [tensor.int_repr()]
    return [tensor.resolve_conj().resolve_neg()]


def raw(tensor: Tensor) -> Tensor:
    """Return the elements of a plain dense tensor as one row of bytes."""
    # as_strided, because one element counts as contiguous whatever its stride.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors are the same to the last bit."""
    if (
        one.dtype != other.dtype
        or one.shape != other.shape
        or one.layout != other.layout
        or one.is_nested != other.is_nested
    ):
        return False
    pairs = zip(dense_parts(one), dense_parts(other), strict=True)
    return all(a.shape == b.shape and torch.equal(raw(a), raw(b)) for a, b in pairs)


def describe_difference(one: Any, other: Any) -> str | None:
    """Say how two results differ; None when they are the same to the last bit."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        if type(one) is type(other) and _plain_bits(one) == _plain_bits(other):
            return None
        return f"{one!r:.60} against {other!r:.60}"
    if same_bits(one, other):
        return None
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype} {tuple(one.shape)}, {other.dtype} {tuple(other.shape)}"
    a, b = (torch.cat([raw(part) for part in dense_parts(t)]) for t in (one, other))
    if a.shape != b.shape:
        return f"{len(a)} against {len(b)} bytes"
    changed = (a != b).sum().item()
    return f"{changed} of {len(a)} bytes of {one.dtype} {tuple(one.shape)}"


def _plain_bits(value: Any) -> Any:
    return value.hex() if isinstance(value, float) else value


def digest(value: Any) -> str:
    """Return a short text that changes with any bit of a tensor or a plain value."""
    summary = hashlib.blake2b(digest_size=12)
    if isinstance(value, Tensor):
        summary.update(repr((value.dtype, tuple(value.shape), value.layout)).encode())
        for part in dense_parts(value):
            summary.update(memoryview(raw(part).numpy()))
    else:
        summary.update(pickle.dumps(value, protocol=4))
    return summary.hexdigest()


def random_state() -> Digests:
    """Digest the random states of torch, Python and NumPy."""
    return {
        "random state of torch": digest(torch.get_rng_state()),
        "random state of Python": digest(random.getstate()),
        "random state of NumPy": digest(np.random.get_state()[1]),
    }


def seed_everything(seed: int) -> None:
    """Set the random states of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def gradients(model: nn.Module) -> Digests:
    """Digest the gradient of every parameter, also of those that have none."""
    return {
        f"gradient of {name}": digest(parameter.grad)
        for name, parameter in model.named_parameters()
    }


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Digests:
    """Digest all that outlives a step: weights, buffers, optimizer, random states."""
    state = gradients(model)
    for name, tensor in model.named_parameters():
        state[f"parameter {name}"] = digest(tensor)
    for name, tensor in model.named_buffers():
        state[f"buffer {name}"] = digest(tensor)
    for index, entry in optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            state[f"optimizer's {key} of parameter {index}"] = digest(value)
    return {**state, **random_state()}


def differing(one: Digests, other: Digests) -> list[str]:
    """Name what differs between two sets of digests."""
    names = [*one, *(name for name in other if name not in one)]
    return [name for name in names if one.get(name) != other.get(name)]
