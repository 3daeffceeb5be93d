"""Iterations: where one ends, what it looked like, what the next will look like.

An iteration runs from the first saved tensor to the moment when none is left, so no
optimizer is needed to find it: accumulation, closures, skipped and hand-written
updates need no special case. The optimizer's step is a hint that ends it where a kept
graph never lets the last one go. What it saved, in order, identifies it
(signature.py): the sequence so far predicts the rest from the latest iteration that
began the same way, and a wrong guess is replaced at the first value that differs.
Iterations that another process has learnt (learnt.py) are followed from the first on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from lowtide.planner.planner import EFFORT, Frontier
from lowtide.planner.recompute import Lineage
from lowtide.planner.schedule import Allowed
from lowtide.recorder.values import Value, replay_later
from lowtide.runtime.signature import Chain, Told, extend, prefixes_of
from lowtide.scheduler.director import Lanes, Rules
from lowtide.trace import OPS, VALUES, Trace

KNOWN = 128  # iterations of different shape remembered
REPLANS = 3  # times a repeated iteration is planned afresh
_STRANGERS = 4  # new ones in a row that are planned; such a program repeats few
_ALIKE = 0.125  # of an iteration: as much has to be the same before it is planned then
_TIGHT = 0.99  # of the budget: what a plan that moves anything aims for
_HURRY = 1.5  # times its wait that a late read begins earlier
_REBASE = 0.002  # of the budget: growth at the start that calls for a new plan


@dataclass(slots=True)
class Forecast:
    """An earlier iteration, and the plan made from it."""

    trace: Trace
    base: int  # live bytes at its first save
    frontier: Frontier
    told: list[Told]  # of each saved value
    plan: NDArray[np.int8] = field(default_factory=lambda: np.zeros(0, np.int8))
    reads: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    bounds: dict[int, int] = field(default_factory=dict)  # reads come no earlier
    planned_peak: int = 0
    seen: int = 1
    growth: int = 0  # live bytes at the start, above those of the trace

    load: NDArray[np.int64] = field(init=False)  # bytes not managed by us, plus need
    prefixes: list[int] = field(init=False)  # numbers of its beginnings

    def __post_init__(self) -> None:
        """Sum up its loads, and number its beginnings."""
        self.load = self.trace.other_bytes
        self.prefixes = prefixes_of([told.number for told in self.told])


def allowed(rules: Rules, swap_bytes: int | None) -> Allowed:
    """Say what plans may choose under a policy, and how much one may swap."""
    return Allowed(
        swap=rules.swap and rules.planned,
        recompute=rules.recompute and rules.planned,
        swap_bytes=swap_bytes,
    )


class Iterations:
    """Records the current iteration and predicts from earlier ones."""

    def __init__(
        self,
        budget: int,
        lanes: Lanes,
        rules: Rules,
        *,
        swap_bytes: int | None = None,
    ) -> None:
        self.budget = budget
        self.lanes = lanes
        self.rules = rules
        self.swap_bytes = swap_bytes  # most that one iteration may swap; None: any
        self.finished = 0
        self.repeated = 0  # of these, such as had been seen before
        self.plan_seconds = 0.0
        self._strangers = 0  # iterations in a row that were new
        self.hastened = 0  # reads that came late, and begin earlier from then on
        self.forecast: Forecast | None = None
        self.last: Forecast | None = None
        self._by_prefix: dict[int, Forecast] = {}
        self._by_key: dict[int, Forecast] = {}
        self._chain = Chain()
        self.begin(0)

    @property
    def known(self) -> list[Forecast]:
        """All iterations remembered, the latest last."""
        return list(self._by_key.values())

    def adopt(self, forecast: Forecast) -> None:
        """Remember an iteration that another run has learnt."""
        self.plan(forecast, forecast.base)
        self._claim(forecast)

    def begin(self, live: int) -> None:
        """Start an iteration: the next saved value is its first."""
        self.ops: list[tuple[float, int, int, int, int]] = []
        self.slots: list[Value] = []
        self._rows: list[list[float]] = []
        self._parents: list[list[int]] = []  # slots that each value is made from
        self._held: list[bool] = []  # by the program too, as backward begins
        self.told: list[Told] = []
        self._beginning = 0  # its number
        self._base = live
        self.used = 0
        self.forecast = None
        self.partial = False  # its beginning was not watched: there is nothing to learn

    def saved(self, value: Value, position: int) -> int | None:
        """Give a value its slot; returns the planned action, None where unknown."""
        if self.partial:
            value.slot = value.next_use = -1
            return None
        slot = value.slot = len(self.slots)
        self.slots.append(value)
        self._rows.append([value.nbytes, position, -1, 0.0, False, 0])
        told = self._chain.tell(value)
        self.told.append(told)
        self._beginning = extend(self._beginning, told.number)
        found = self._by_prefix.get(self._beginning)
        if found is not self.forecast:
            self.forecast = found
            if found is not None:
                self._rebase(found)
            self._foretell()
        elif found is not None:
            value.next_use = int(found.trace.values["first_use"][slot])
        if found is None or value.op is None:
            return None
        if not len(found.plan):
            if slot < _ALIKE * len(found.prefixes):
                return None
            self.plan(found, self._base)
        return int(found.plan[slot])

    def _rebase(self, forecast: Forecast) -> None:
        """Plan again where the iteration starts with other live bytes than before."""
        growth = self._base - forecast.base
        if not len(forecast.plan):
            forecast.growth = growth
        elif abs(growth - forecast.growth) > _REBASE * self.budget:
            self.plan(forecast, self._base)

    def _foretell(self) -> None:
        """Hand the forecast's next uses to every value saved so far."""
        forecast = self.forecast
        if forecast is None:
            for value in self.slots:
                value.next_use = -1
            return
        uses = forecast.trace.values["first_use"]
        for value, use in zip(self.slots, uses, strict=False):
            value.next_use = int(use)

    def load_between(self, start: int, stop: int) -> int | None:
        """Return the largest load foretold: bytes not managed by us, plus need."""
        if self.forecast is None:
            return None
        ahead = self.forecast.load[max(start, 0) : stop]
        return int(ahead.max()) + self.forecast.growth if len(ahead) else None

    def due(self, value: Value) -> int:
        """Return the operator before which the plan reads a value back; -1: none."""
        forecast, slot = self.forecast, value.slot
        if forecast is None or not 0 <= slot < len(forecast.reads):
            return -1
        return int(forecast.reads[slot]) if self.slots[slot] is value else -1

    def postpone(self, value: Value, position: int) -> None:
        """Plan a read for later: its room was wanted otherwise before here."""
        if self.forecast is not None and self.due(value) >= 0:
            self.forecast.reads[value.slot] = position + 1
            self.forecast.bounds[value.slot] = position + 1

    def hasten(self, value: Value, waited: float, ahead: bool) -> None:
        """Plan a read for earlier: it was waited for, so many seconds.

        By half as much again as the wait, and by one operator at least, but never where
        its room was wanted otherwise: so it comes to rest. One that was not begun
        `ahead`, though it was due, found no room: an earlier trigger would not help.
        """
        forecast, due = self.forecast, self.due(value)
        if forecast is None or due <= 0 or not (ahead or due >= value.next_use):
            return
        slot = value.slot
        ends = np.cumsum(forecast.trace.ops["seconds"][:due])
        begin = float(ends[-1]) - _HURRY * waited
        earlier = min(int(np.searchsorted(ends, begin, "right")), due - 1)
        bound = forecast.bounds.get(slot, int(forecast.trace.values["saved"][slot]))
        moved = max(earlier, min(bound, due))
        self.hastened += moved < due
        forecast.reads[slot] = moved

    def use(self, value: Value, position: int) -> None:
        """Note that autograd asked for a value."""
        slot = value.slot
        if 0 <= slot < len(self._rows) and self.slots[slot] is value:
            row = self._rows[slot]
            if row[2] < 0:
                if not self.used:
                    self._survey()
                row[2] = position
                self.used += 1

    def _survey(self) -> None:
        """Look, as backward begins, at what each value could be made from again."""
        known = self._by_key.get(self._beginning)
        if known is not None and known.seen >= REPLANS:
            return
        slots = {id(value): slot for slot, value in enumerate(self.slots)}
        for value, row in zip(self.slots, self._rows, strict=True):
            replay, parents = replay_later(value, slots)
            if replay is not None:
                row[3:6] = replay.seconds, True, replay.scratch
            self._parents.append(parents)
            self._held.append(value.resident and value.held_by_others())

    def finish(self) -> Forecast | None:
        """End the iteration; returns its forecast when it had any backward."""
        result = None
        if self.used and self.ops and not self.partial:
            result = self._remember()
            self.last = result
            self.finished += 1
            self.repeated += result.seen > 1
        return result

    def _remember(self) -> Forecast:
        known = self._by_key.get(self._beginning)
        if known is not None and known.seen >= REPLANS:
            known.seen += 1
            self._claim(known)
            return known
        trace = Trace(
            np.array(self.ops, dtype=OPS),
            np.array([tuple(row) for row in self._rows], dtype=VALUES),
            self._beginning,
        )
        missing = len(self._rows) - len(self._parents)  # saved during backward
        held = np.array(self._held + [True] * missing, dtype=np.bool_)
        frontier = Frontier(
            trace,
            self.lanes,
            allowed(self.rules, self.swap_bytes),
            lineage=Lineage.of(self._parents + [[]] * missing),
            held=held,
            effort=EFFORT >> (4 if known is None else 0),  # it may never come again
        )
        forecast = Forecast(
            trace=trace,
            frontier=frontier,
            base=self._base,
            told=self.told,
            seen=1 if known is None else known.seen + 1,
        )
        self._strangers = self._strangers + 1 if known is None else 0
        if self._strangers <= _STRANGERS:  # else only once it seems to come again
            self.plan(forecast, self._base)
        self._claim(forecast)
        return forecast

    def plan(self, forecast: Forecast, base: int) -> None:
        """Plan a remembered iteration for the live bytes at its start."""
        start = perf_counter()
        grown = forecast.growth = base - forecast.base
        whole = forecast.trace.plain_peak_bytes + grown
        # what fits whole is repeated as it was; what is moved needs some leeway
        target = int(self.budget * (1 if whole <= self.budget else _TIGHT)) - grown
        plan = forecast.frontier.at(target)
        forecast.plan, forecast.reads = plan.codes, plan.reads
        forecast.bounds.clear()
        forecast.planned_peak = plan.peak_bytes + grown
        self.plan_seconds += perf_counter() - start

    def _claim(self, forecast: Forecast) -> None:
        """Make this the latest iteration, which its beginnings foretell."""
        key = forecast.trace.key
        old = self._by_key.pop(key, None)
        if old is None and len(self._by_key) >= KNOWN:
            old = self._by_key.pop(next(iter(self._by_key)))
        if old is not None and old is not forecast:
            for prefix in old.prefixes:
                if self._by_prefix.get(prefix) is old:
                    del self._by_prefix[prefix]
        self._by_key[key] = forecast
        for prefix in forecast.prefixes:
            self._by_prefix[prefix] = forecast
