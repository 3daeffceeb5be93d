"""What an operator's schema says about memory, and where schemas are silent.

Facts are derived once per overload and cached. Schemas name the arguments that are
written and the returns that alias; they do not name batch norm's running statistics,
random draws of fused recurrent layers, or state hidden in a backend, so those stand
in lists here (see "Seeded tags lie a little" in the design notes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

OpOverload = torch._ops.OpOverload

# Batch norms write their running statistics without saying so. In training mode their
# results do not read them, so a replay hands in scratch statistics instead.
# name -> (position of running_mean, of running_var, of the `training` flag or None)
_RUNNING_STATISTICS: dict[str, tuple[int, int, int | None]] = {
    "aten::native_batch_norm": (3, 4, 5),
    "aten::cudnn_batch_norm": (3, 4, 5),
    "aten::miopen_batch_norm": (3, 4, 5),
    "aten::_native_batch_norm_legit": (3, 4, 5),
    "aten::_batch_norm_with_update": (3, 4, None),
    "aten::_native_batch_norm_legit_functional": (3, 4, 5),
    "aten::batch_norm_update_stats": (1, 2, None),
}

# Sums into one place that several threads, or a GPU's, add to in any order: where so,
# plain PyTorch does not repeat its own bits, and a replay would not find the first.
_ANY_ORDER = frozenset(
    f"aten::{name}{suffix}"
    for name in [
        *("index_put", "_index_put_impl", "_unsafe_index_put"),
        *("_unsafe_masked_index_put_accumulate", "put", "index_add", "index_reduce"),
        *("scatter_add", "scatter_reduce", "bincount", "histc", "cumsum"),
    ]
    for suffix in ("", "_")
)

# Never replayed: hidden state or randomness without a tag, or results that depend on
# the moment (uninitialised memory is allowed: what follows overwrites it).
_NEVER_REPLAYED = frozenset(
    {
        "aten::mkldnn_rnn_layer",
        "aten::_cudnn_rnn",
        "aten::miopen_rnn",
        "aten::_cudnn_init_dropout_state",
        "aten::_thnn_fused_lstm_cell",
        "aten::_thnn_fused_gru_cell",
        "aten::set_",
        "aten::resize_",
        "aten::resize_as_",
        "aten::resize",
        "aten::_resize_output_",
        "aten::_pin_memory",
        "aten::record_stream",
        "aten::from_file",
        "aten::_local_scalar_dense",
    }
)

# Their results are often written through a raw pointer, unseen, by the C++ code that
# asked for them: the value begins at the first full write that is seen.
_BLANK = frozenset(
    f"aten::{name}"
    for name in [
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
        "zeros",
        "zeros_like",
        "new_zeros",
    ]
)

# In-place operators that overwrite their first argument without reading it.
_OVERWRITES = frozenset(
    f"aten::{name}"
    for name in [
        "bernoulli_",
        "cauchy_",
        "copy_",
        "exponential_",
        "fill_",
        "geometric_",
        "log_normal_",
        "normal_",
        "random_",
        "uniform_",
        "zero_",
    ]
)

_SEEDED_WITHOUT_TAG = frozenset({"aten::rrelu_with_noise_", "aten::_fused_dropout"})

# These change which storage a tensor has, or its size: the old value ends unseen.
_REBINDS = frozenset(
    {
        "aten::set_",
        "aten::resize_",
        "aten::resize_as_",
        "aten::_resize_output_",
        "aten::resize_as_sparse_",
    }
)


@dataclass(frozen=True, slots=True)
class Facts:
    """Static facts about one operator overload."""

    name: str  # e.g. "aten::mul"
    views: bool  # touches no bytes: returns aliases of its inputs, or marks a range
    writes: tuple[int, ...]  # positions of written positional arguments
    writes_named: tuple[str, ...]  # names of written keyword-only arguments
    writes_list: bool  # some written argument is a list of tensors (foreach)
    seeded: bool  # draws from a random generator
    replayable: bool  # pure up to its writes and its random draws
    rebinds: bool  # changes a tensor's storage or its size
    overwrites: bool  # writes its first argument without reading it
    running_statistics: tuple[int, int, int | None] | None


_cache: dict[Any, Facts] = {}


def facts_of(func: Any) -> Facts:
    """Return the facts about an `OpOverload`, computed at its first use."""
    found = _cache.get(func)
    if found is None:
        found = _cache[func] = _derive(func)
    return found


def only_aliases(schema: Any) -> bool:
    """Say whether an operator writes nothing and returns only views of its inputs."""
    return (
        not any(
            a.alias_info is not None and a.alias_info.is_write for a in schema.arguments
        )
        and len(schema.returns) > 0
        and all(r.alias_info is not None for r in schema.returns)
    )


def _derive(func: Any) -> Facts:
    schema = func._schema
    name: str = schema.name
    writes: list[int] = []
    named: list[str] = []
    writes_list = False
    position = 0
    for argument in schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and "[]" in str(argument.type):
            writes_list = True
        if argument.kwarg_only:
            if written:
                named.append(argument.name)
        else:
            if written:
                writes.append(position)
            position += 1
    statistics = _RUNNING_STATISTICS.get(name)
    if statistics is not None:
        writes = sorted({*writes, statistics[0], statistics[1]})
    views = func.namespace == "profiler" or only_aliases(schema)
    tags = func.tags
    seeded = torch.Tag.nondeterministic_seeded in tags or name in _SEEDED_WITHOUT_TAG
    replayable = func.namespace in ("aten", "prims") and name not in _NEVER_REPLAYED
    replayable = replayable and name not in _BLANK | _ANY_ORDER
    return Facts(
        name=name,
        views=views,
        writes=tuple(writes),
        writes_named=tuple(named),
        writes_list=writes_list,
        seeded=seeded,
        replayable=replayable and not writes_list,
        rebinds=name in _REBINDS,
        overwrites=name in _OVERWRITES,
        running_statistics=statistics,
    )
