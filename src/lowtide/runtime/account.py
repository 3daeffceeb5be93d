"""The account of a run: steps, peaks and totals, summed up as a Timeline."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from lowtide.recorder.values import Value
from lowtide.timeline import Kept, Timeline

if TYPE_CHECKING:
    from lowtide.runtime.session import Session

_HIGHER = 1.001  # times the highest so far: worth a closer look
_SMALL = 32 << 10  # bytes below which a value is not moved (scheduler.director)


class Account:
    """Figures of one session, kept as it goes."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.steps = 0
        self.first_peak = self.later_peak = 0
        self.plain_peak = 0
        self.static = 0
        self.moved = False  # anything ever left memory
        self.elsewhere = False  # an optimizer or backward ran in another thread
        self._step_ends: list[float] = []
        self._totals: dict[str, float] = {}
        self._marks = (0.0, 0.0, 0.0)
        self._whole: dict[str, Kept] = {}  # kept as they are, in this iteration so far
        self._most_whole: dict[str, Kept] = {}  # in that iteration that kept most so
        # As backward began: why a value stayed, and what had made it.
        self._reasons: dict[Value, tuple[str, str]] = {}
        self._stayed: dict[str, Kept] = {}  # in the last iteration

    # -- as it goes -------------------------------------------------------------

    def step(self) -> int:
        """Note the end of a step; returns its peak in bytes."""
        self.steps += 1
        self._step_ends.append(perf_counter())
        counter = self.session.counter
        peak = int(counter.peak.value)
        if self.first_peak == 0:
            self.first_peak = peak
        else:
            self.later_peak = max(self.later_peak, peak)
        if self.session.recorder.resting is not None:  # nothing is away
            self.plain_peak = max(self.plain_peak, peak)
        counter.reset_peak()
        return peak

    def kept_whole(self, tensor: torch.Tensor) -> None:
        """Note a saved tensor that lowtide does not move."""
        kind = type(tensor).__name__
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            kind = f"{tensor.layout}, {tensor.dtype}, {tensor.device.type}"
        n_bytes = 0
        with suppress(RuntimeError):  # some subclasses have no size of their own
            n_bytes = tensor.numel() * tensor.element_size()
        shape = "x".join(str(n) for n in tensor.shape)
        _add(self._whole, f"not a plain dense tensor ({kind})", n_bytes, shape)

    def reached(self, plain: int) -> None:
        """Note what would be in memory now, and at most, had nothing left it.

        What is there for lowtide alone has yet to be taken off.
        """
        if plain > self.plain_peak * _HIGHER:
            self.plain_peak = max(
                self.plain_peak, plain - self.session.ledger.surplus()
            )

    def classify(self) -> None:
        """Look up, as backward begins, why what is still in memory is there."""
        self._reasons = {
            value: (_reason(value), _maker(value))
            for value in self.session.ledger.alive
            if not value.away
        }

    def iteration(self, *, whole: bool) -> bool:
        """Keep the figures of an iteration that has just ended, if it was a whole one.

        What was saved parts into what stayed, was swapped, and was recomputed. Says
        whether anything left memory.
        """
        session = self.session
        ledger, replayer = session.ledger, session.replayer
        moved = bool(ledger.swapped or ledger.dropped)
        self.moved |= moved
        for reason, kept in self._whole.items():
            most = self._most_whole.setdefault(reason, kept)
            if kept.bytes > most.bytes:
                self._most_whole[reason] = kept
        if whole:
            self._sum_up()
        ledger.end_iteration()
        self._reasons, self._whole = {}, {}
        self._marks = (ledger.exposed, replayer.seconds, ledger.deciding)
        return moved

    def _sum_up(self) -> None:
        session = self.session
        ledger, replayer = session.ledger, session.replayer
        exposed, replayed, decided = self._marks
        left = ledger.swapped | ledger.dropped
        stayed = dict(self._most_whole)
        for value in session.iterations.slots:
            if value not in left:
                why = self._reasons.get(value, ("saved during backward", ""))
                _add(stayed, why[0], value.nbytes, why[1])
        self._stayed = stayed
        self._totals = {
            "kept": sum(kept.bytes for kept in stayed.values()),
            "swapped": sum(v.nbytes for v in ledger.swapped),
            "recomputed": sum(v.nbytes for v in ledger.dropped - ledger.swapped),
            "exposed": ledger.exposed - exposed,
            "replay": replayer.seconds - replayed,
            "decide": ledger.deciding - decided,
        }

    # -- at the end -------------------------------------------------------------

    def timeline(self, outcome: str) -> Timeline:
        """Sum up what happened so far, and how it ended."""
        session, totals = self.session, self._totals
        self._note_last_peak()
        gaps = [b - a for a, b in pairwise(self._step_ends)]
        last, lane = session.iterations.last, session.lane
        kept = int(totals.get("kept", 0))
        swapped = int(totals.get("swapped", 0))
        recomputed = int(totals.get("recomputed", 0))
        verifier = session.ledger.verifier
        plain = self.plain_peak
        if not self.moved:
            plain = max(plain, self.first_peak, self.later_peak)
        return Timeline(
            policy=session.rules.name,
            allocator=session.counter.name,
            budget_bytes=session.budget,
            plain_peak_bytes=plain,
            plain_peak_known=not self.moved,
            static_bytes=self.static,
            floor_bytes=session.steward.floor,
            smallest_bytes=session.steward.smallest,
            planned_peak_bytes=last.planned_peak if last is not None else 0,
            peak_bytes=self.later_peak or self.first_peak,
            first_peak_bytes=self.first_peak,
            steps=self.steps,
            step_seconds=median(gaps) if gaps else 0.0,
            trained=session.iterations.finished > 0,
            saved_bytes=kept + swapped + recomputed,
            kept_bytes=kept,
            swapped_bytes=swapped,
            recomputed_bytes=recomputed,
            exposed_seconds=totals.get("exposed", 0.0),
            replay_seconds=totals.get("replay", 0.0),
            decide_seconds=totals.get("decide", 0.0),
            plan_seconds=session.iterations.plan_seconds,
            written_bytes=lane.written_bytes if lane is not None else 0,
            read_bytes=lane.read_bytes if lane is not None else 0,
            step_written_bytes=lane.step_written_bytes if lane is not None else 0,
            verified_tensors=verifier.checked if verifier is not None else 0,
            kept=tuple((self._stayed or self._whole).values()),
            notes=self._notes(),
            outcome=outcome,
        )

    def _note_last_peak(self) -> None:
        peak = int(self.session.counter.peak.value)
        only_one = self.steps == 1 and self.session.iterations.finished <= 1
        if self.first_peak == 0 or self.steps == 0 or only_one:
            self.first_peak = max(self.first_peak, peak)
        else:
            self.later_peak = max(self.later_peak, peak)

    def _notes(self) -> tuple[str, ...]:
        notes = list(self.session.ledger.complaints.values())
        if self.session.lane is not None:
            notes += self.session.lane.remarks()
        if self.elsewhere:
            notes.append(
                "a thread that the program started has trained, or run backward: what "
                "runs there is computed as ever, but takes what memory it needs"
            )
        misjudged = self.session.steward.misjudged
        if misjudged:
            notes.append(
                f"{misjudged} operator{'s' if misjudged > 1 else ''} needed more than "
                "was known at the first run, and exceeded the budget then"
            )
        return tuple(notes)


def _reason(value: Value) -> str:
    if value.kept_because is not None:
        return value.kept_because
    if value.held_by_others():
        if value.op is None:
            return "a parameter, buffer or input that the program holds"
        return "held by the program at the start of backward"
    if value.nbytes < _SMALL:
        return "too small to be worth moving"
    return "it fitted"


def _maker(value: Value) -> str:
    return value.op.facts.name if value.op is not None else ""


def _add(into: dict[str, Kept], reason: str, n_bytes: int, example: str) -> None:
    old = into.get(reason, Kept(reason, 0, 0, example))
    into[reason] = Kept(reason, old.tensors + 1, old.bytes + n_bytes, old.example)
