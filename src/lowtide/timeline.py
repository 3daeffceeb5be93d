"""A Timeline: what a run under a budget did. Bytes and seconds, no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

FINISHED, RUNNING, INTERRUPTED = "finished", "running", "interrupted"


def outcome_of(error: BaseException | None) -> str:
    """Say in a word how a run ended: by itself, by Ctrl-C, or by which error."""
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return FINISHED
        number = error.code if isinstance(error.code, int) else 1
        return f"exit status {number}"
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return FINISHED if error is None else type(error).__name__


@dataclass(frozen=True, slots=True)
class Kept:
    """Saved tensors that stayed in memory for one reason."""

    reason: str
    tensors: int
    bytes: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One run: its budget, what it reached, what moved and what stayed.

    Peaks are allocator-counted live bytes: parameters, gradients, optimizer state,
    activations and workspace.
    """

    policy: str
    allocator: str  # "lowtide", or "python" where no compiler was found
    budget_bytes: int
    plain_peak_bytes: int  # what the iteration would have needed with nothing away
    plain_peak_known: bool  # measured (nothing ever left), not computed
    static_bytes: int  # live between iterations
    floor_bytes: int  # largest working set seen of one operator; 0 while unknown
    smallest_bytes: int  # smallest budget that works; 0 while unknown
    planned_peak_bytes: int
    peak_bytes: int  # measured, from the second iteration on
    first_peak_bytes: int  # measured, first iteration
    steps: int
    step_seconds: float  # median
    trained: bool  # any backward was seen
    saved_bytes: int  # per iteration: all that autograd saved
    kept_bytes: int
    swapped_bytes: int
    recomputed_bytes: int
    exposed_seconds: float  # waited for copies, per iteration
    replay_seconds: float  # spent computing again, per iteration
    decide_seconds: float  # spent deciding, per iteration; planning not counted
    written_bytes: int  # whole run
    read_bytes: int
    verified_tensors: int
    kept: tuple[Kept, ...]
    notes: tuple[str, ...]
    step_written_bytes: int = 0  # by the step that wrote most to the disk
    outcome: str = FINISHED  # or RUNNING, or what `outcome_of` says of its error
    plan_seconds: float = 0.0  # spent planning iterations seen anew, whole run

    def to_dict(self) -> dict[str, Any]:
        """Return the plain dictionary that `--report` writes as JSON."""
        return asdict(self)
