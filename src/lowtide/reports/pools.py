# SPDX-License-Identifier: Apache-2.0
"""Say what a planned pool could have saved: `lowtide pool`.

step.pickle: CUDA memory snapshot of cuda:0

  peak live           7.98 GiB
  lower bound         7.98 GiB   no placement is lower
  planned pool        7.98 GiB   1.000 x the bound; proved optimal
  caching            10.12 GiB   1.268 x; a plan saves 2.14 GiB (21%)
  ...
"""

from dataclasses import dataclass

from lowtide.units import format_bytes

MEANING = {
    "caching": "PyTorch's caching allocator",
    "expandable": "the same, expandable segments",
    "bfc": "TensorFlow's BFC",
    "cnmem": "NVIDIA's CnMem",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFootprint:
    """What a model of an allocator reserves for the same blocks."""

    name: str  # one of simulator.caching.MODELS
    reserved_bytes: int
    segments: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """A planned pool beside the allocators that know no future."""

    file: str
    kind: str
    device: str
    blocks: int
    period: int  # of the iteration that was planned; 0: the file as a whole
    peak_bytes: int  # of the file as a whole
    lower_bound_bytes: int  # of what was planned, with what stays
    pool_bytes: int  # likewise
    staying_bytes: int  # there before the iteration and after it; in both above
    groups: int  # streams and pools, planned apart
    optimal: bool
    models: tuple[ModelFootprint, ...]
    reserved_bytes: int  # by the allocator that was in use; 0: unknown
    notes: tuple[str, ...]


def render_pool(report: PoolReport) -> str:
    """Return the text, ending in a newline."""
    whose = f" of {report.device}" if report.device else ""
    lines = [f"{report.file}: {report.kind}{whose}", ""]
    lines.append(_row("peak live", report.peak_bytes, f"of {report.blocks:,} blocks"))
    bound = "no placement is lower"
    if report.groups > 1:
        bound += f"; {report.groups} streams or pools apart"
    lines.append(_row("lower bound", report.lower_bound_bytes, bound))
    lines.append(_row("planned pool", report.pool_bytes, _quality(report)))
    if report.staying_bytes:
        stays = "of it, there before the iteration and after it"
        lines.append(_row("  stays", report.staying_bytes, stays))
    lines += ["", "  Without a plan, by models of allocators"]
    for model in report.models:
        lines.append(_row(model.name, model.reserved_bytes, _saving(model, report)))
    if report.reserved_bytes:
        was = "by the allocator that was in use"
        lines.append(_row("reserved", report.reserved_bytes, was))
    lines += ["", f"  {_scope(report)}"]
    lines += [f"  note: {note}" for note in report.notes]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _quality(report: PoolReport) -> str:
    ratio = report.pool_bytes / report.lower_bound_bytes if report.pool_bytes else 1.0
    proof = "; proved optimal" if report.optimal else ""
    return f"{ratio:.4f} x the lower bound{proof}"


def _saving(model: ModelFootprint, report: PoolReport) -> str:
    saved = model.reserved_bytes - report.pool_bytes
    meaning = MEANING.get(model.name, "")
    if saved <= 0:
        return f"{meaning}; a plan saves nothing"
    share = saved / model.reserved_bytes
    return f"{meaning}; a plan saves {format_bytes(saved)} ({share:.1%})"


def _scope(report: PoolReport) -> str:
    if report.period:
        return (
            f"Planned: one steady iteration ({report.period:,} allocations and "
            "releases), which the file repeats."
        )
    return "Planned: the file as a whole, since no iteration repeats in it."


def _row(label: str, n_bytes: int, comment: str) -> str:
    return f"  {label:<16}{format_bytes(n_bytes):>12}   {comment}"
