"""The steward: has room free before an operator runs, and looks at what it took.

Before: what the operator needs is known from its last run with the same shapes, or
estimated; saved values leave until it fits; planned copies start; what backward will
ask for next is read ahead where it fits all the way. After: the measured need is
remembered, and an exceeded budget is either a need that was not known (once) or an
operator that cannot fit. While a program is being learnt the latter is measured to
the end, so that the error can name the smallest budget that works.
"""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from lowtide.errors import BudgetError
from lowtide.recorder.arguments import tensors_in
from lowtide.recorder.values import Value, replay_now
from lowtide.runtime.allocator import PythonCounter
from lowtide.runtime.devices import release_cache
from lowtide.runtime.estimate import Signature, estimate_need, signature_of
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.runtime.session import Session

_log = logging.getLogger("lowtide")

# The smallest budget named lies above the largest working set seen: how far copies have
# come, and small values that are not worth moving, differ from one run to the next.
_MARGIN = 1.01
_SLACK = 256 << 10  # bytes
_LEARNING = 2  # steps that may measure on after an operator did not fit
_AMPLE = 8  # times the largest need: room for it means that nothing need be estimated
_FILLING = 0.6  # of the budget: above it, copies start without a plan
_ALL = 1 << 61  # bytes: more than anything

Token = tuple[int, "Signature | None"]


class Steward:
    """Keeps one session's budget, operator by operator (recorder.dispatch.Listener)."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.ledger = session.ledger
        self.scheduler = session.scheduler
        self.iterations = session.iterations
        self.counter = session.counter
        self.budget = session.budget
        self.misjudged = 0  # operators that needed more than was known
        self.floor = 0  # largest working set of one operator with all that stays
        self.floor_operator = ""
        self.overrun = False  # measuring on although an operator did not fit
        self._failed = False  # a BudgetError is on its way out
        self._measured = False  # steps were run to their end beyond the budget
        self.needs: dict[Signature, int] = {}
        self.largest_need = 0
        self._need = 0  # of the operator about to run
        self._pinned = 0

    # -- before an operator -----------------------------------------------------

    def before(self, func: Any, args: Any, kwargs: Any) -> Token:
        """Make room for an operator; returns the live bytes and its signature."""
        session, ledger, live = self.session, self.ledger, self.counter.live
        if ledger.streams is not None:
            ledger.streams.look()
        if ledger.orphans:
            ledger.drain()
            session.end_if_idle()
        start, waited = perf_counter(), ledger.exposed
        signature = None
        self._need = self.largest_need
        if session.forced:
            ledger.force()
        else:
            if (
                live.value + self.largest_need > self.budget
                or self.scheduler.absent  # reads ahead go by what is needed here
                or session.account.steps < _LEARNING
                or (self.iterations.forecast is None and not self._unhurried)
            ):
                signature = self._reserve(func, args, kwargs)
            if self.scheduler.to_write:
                self._write_early()
            if self.scheduler.absent:
                self._prefetch()
        if session.measure_floor:
            self._pinned = self.pinned()
        now = live.value
        self.counter.op_peak.value = now
        ledger.deciding += perf_counter() - start - (ledger.exposed - waited)
        return now, signature

    def _reserve(self, func: Any, args: Any, kwargs: Any) -> Signature | None:
        """Free what the operator needs, where it is not free already."""
        live = self.counter.live
        try:
            signature = signature_of(func, args, kwargs)
            known = self.needs.get(signature)
        except TypeError:
            signature, known = None, None  # an argument that cannot be hashed
        if known is not None:
            self._need = certain = known
            if live.value + self.largest_need <= self.budget:
                return signature
        else:
            if self._unhurried and not self.overrun:
                return signature
            certain, self._need = estimate_need(func, args, kwargs)
            if self.session.followed is not None and signature is not None:
                self._need = self.session.followed.need(signature, self._need)
        if self.overrun:
            self.ledger.make_room(_ALL)
        elif live.value + self._need > self.budget:
            fits = self.ledger.make_room(self._need)
            if not fits and live.value + certain > self.budget:
                self.short(str(func), live.value + certain)
        return signature

    @property
    def _unhurried(self) -> bool:
        """Whether a need not known yet may be risked: it would have to be enormous.

        Only once the program has shown what its operators need.
        """
        if self.session.account.steps < _LEARNING:
            return False
        ample = self.counter.live.value + _AMPLE * self.largest_need
        return bool(ample <= self.budget)

    def _write_early(self) -> None:
        """Start planned copies; without a plan only once memory fills."""
        planned = self.iterations.forecast is not None
        if planned or self.counter.live.value > _FILLING * self.budget:
            self.ledger.early_writes()

    def _prefetch(self) -> None:
        """Read ahead what will be asked for next, where it fits all the way.

        Where a plan reads it back by now, it has seen to the room from here on.
        """
        if torch.is_grad_enabled() or self.overrun:
            return
        position = self.session.recorder.index - 1  # of the operator about to run
        live = self.counter.live.value
        forecast, lead = self.iterations.forecast, self.ledger.lead
        lead.look(None if forecast is None else forecast.trace, position)
        for value in self.scheduler.returns(position):
            if value.reading is not None:
                continue
            room = self.budget - live - self._need
            if not 0 <= self.iterations.due(value) <= position:
                if not lead.wants(value.next_use):
                    return
                room = min(room, self._room_until(value.next_use, position, live))
            if value.nbytes > room or not value.clean:
                return
            if not self.ledger.read_ahead(value):
                return
            live += value.nbytes

    def postpone(self, value: Value) -> None:
        """Note that a read ahead was given up: the room was wanted otherwise."""
        self.iterations.postpone(value, self.session.recorder.index - 1)

    def _room_until(self, use: int, position: int, live: int) -> int:
        """Return the bytes that will be free all the way from here to an operator."""
        load = self.iterations.load_between(position, max(use, position) + 1)
        if load is None:
            return int(self.budget - live - 2 * self.largest_need)
        return self.budget - load - self.ledger.managed - self.ledger.arriving

    # -- after an operator ------------------------------------------------------

    def after(self, func: Any, token: Token, seconds: float, result: Any) -> int:
        """Note an operator's end; returns the bytes it needed."""
        live, signature = token
        if isinstance(self.counter, PythonCounter):
            _track(self.counter, result)
        peak = self.counter.op_peak.value
        need = int(peak - live)
        self.scheduler.now += seconds
        if signature is not None:
            if need > self.needs.get(signature, -1):
                self.needs[signature] = need
            self.largest_need = max(self.largest_need, need)
        self.session.note_operator(func, seconds, live, need)
        if peak > self.budget and not self.session.forced:
            self._exceeded(str(func), live, need)
        if self.session.measure_floor and self._pinned + need > self.floor:
            self.floor = self._pinned + need
            self.floor_operator = str(func)
        return need

    def starved(self) -> None:
        """Let go of all that can go: the device is out of memory, despite the count."""
        self.ledger.make_room(self.budget)
        release_cache(self.session.device_type)

    def before_write(self, value: Value) -> None:
        """Save what is owed of a value that is about to be overwritten."""
        self.ledger.before_write(value)

    # -- what fits --------------------------------------------------------------

    def pinned(self) -> int:
        """Return the live bytes that could not leave at this moment."""
        ledger = self.ledger
        movable = sum(
            v.nbytes for v in ledger.alive if v.reading is not None or ledger.movable(v)
        )
        movable += sum(v.nbytes for _, v, _ in ledger.flights if v not in ledger.alive)
        return int(self.counter.live.value - movable)

    def replay_fits(self, value: Value) -> bool:
        """Say whether a value could be computed again when it is wanted.

        A replay needs its inputs and outputs beside what is there then. Where that
        would not fit, a copy is the only way back.
        """
        if self.session.lane is None or self.session.forced:
            return True
        replay = replay_now(value)
        scratch = 0 if replay is None else replay.scratch
        use = value.next_use
        load = self.iterations.load_between(use, use + 1) if use >= 0 else None
        if load is None:
            load = self.counter.live.value - self.ledger.managed + self.largest_need
        return load + scratch <= self.budget

    # -- budgets that cannot be kept --------------------------------------------

    def _exceeded(self, operator: str, live: int, need: int) -> None:
        """The budget was exceeded: by a need not known before, or for want of room."""
        if not self.overrun:
            result = max(0, int(self.counter.live.value) - live)  # it is pinned too
            pinned = min(live, self.pinned() - result)
            if pinned + need <= self.budget:
                self.misjudged += 1  # the need is known from now on
                return
            live = pinned
        self.short(operator, live + need)

    def short(self, operator: str, needed: int) -> None:
        """An operator cannot fit: measure on while learning, else stop here."""
        if self._failed or self.session.forced:
            return
        if needed > self.floor:
            self.floor, self.floor_operator = needed, operator
        if self.session.account.steps >= _LEARNING and not self.overrun:
            self._failed = True
            raise BudgetError(
                budget_bytes=self.budget, operator=operator, needed_bytes=needed
            )
        if not self.overrun:
            _log.warning(
                "lowtide: a budget of %s is too small for %s; measuring on beyond it, "
                "for at most %d steps, to find the smallest that works",
                format_bytes(self.budget),
                operator,
                _LEARNING,
            )
        self.overrun = True

    def give_up(self, *, ended: bool = False) -> None:
        """Raise the error once enough was measured, if an operator did not fit."""
        if not self.overrun or not (ended or self.session.account.steps >= _LEARNING):
            return
        self.overrun = False
        self._failed = self._measured = True
        raise BudgetError(
            budget_bytes=self.budget,
            operator=self.floor_operator,
            needed_bytes=self.floor,
            smallest_bytes=self.smallest,
        )

    def recover(self) -> None:
        """Judge anew: the program goes on after an error, perhaps with less to do."""
        self._failed = False

    @property
    def smallest(self) -> int:
        """The smallest budget that works; 0 while unknown.

        One operator that did not fit says nothing of those after it.
        """
        if not (self._measured or self.session.measure_floor):
            return 0
        return int(self.floor * _MARGIN) + _SLACK if self.floor else 0


def _track(counter: PythonCounter, result: Any) -> None:
    """Tell the Python counter of the storages that an operator returned."""
    for tensor in tensors_in(result):
        if tensor.layout is torch.strided and tensor.device.type == "cpu":
            counter.track(tensor.untyped_storage())
