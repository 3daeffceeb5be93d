"""Rest: while iterations repeat and all of them fits, next to nothing is watched.

After a few equal iterations that fit whole, lineage, needs and traces are learnt no
more. What remains is a comparison an operator, of the live bytes with those at the
same place of the iteration that is repeated (and is it the same operator?), and one a
saved tensor, of its size. Where either differs the session wakes in the middle of the
iteration: what was saved since can then be swapped, if not computed again, and the rest
is watched in full.

Writes pass unseen at rest. That is safe because nothing is away then, and nothing is
to be computed again; a value is told from the next one of its storage by the version
counter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide.recorder.values import Value
from lowtide.runtime.allocator import NativeCounter
from lowtide.runtime.iterations import Forecast

if TYPE_CHECKING:
    from lowtide.runtime.session import Session

_EQUAL = 3  # iterations in a row that must be equal before rest


class Rest:
    """Decides when a session rests, and notices what ends its rest."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._equal = 0
        self._key: int | None = None
        self._ran: list[tuple[Any, int]] = []  # this iteration's operators: see `ran`
        self._most = 0  # bytes that one of them needed with all that was live
        # Of the iteration that is repeated:
        self._operators: list[tuple[Any, int]] = []
        self._sizes: list[int] = []  # of each saved value
        self._headroom = 0
        self._slot = 0

    def consider(self, forecast: Forecast | None, *, moved: bool) -> None:
        """Rest from now on, if the iteration that has just ended is one to repeat.

        `moved` says that something left memory in it: not all policies plan that.
        """
        if forecast is None:
            return
        same = forecast.trace.key == self._key
        self._equal = self._equal + 1 if same else 1
        self._key = forecast.trace.key
        session = self.session
        self._headroom = session.budget - self._most
        if (
            self._equal < _EQUAL
            or moved
            or self._headroom < 0
            or forecast.plan.any()
            or session.forced
            or session.measure_floor
            or session.steward.overrun
            or not isinstance(session.counter, NativeCounter)
            or session.ledger.alive
            or session.ledger.flights
        ):
            return
        self._sizes = forecast.trace.values["bytes"].tolist()
        self._operators = self._ran
        session.recorder.resting = self.undisturbed

    def wake(self) -> None:
        """Watch in full again; what this iteration has saved so far joins in."""
        session = self.session
        session.recorder.resting = None
        self._equal, self._key = 0, None
        session.iterations.partial = True
        session.ledger.drain()
        for value in session.ledger.alive:
            if value.kept_because is None:
                session.scheduler.saved(value, None)

    def ran(self, operator: Any, live: int, need: int) -> None:
        """Note an operator that was watched: the live bytes at its start, its need."""
        self._ran.append((operator, live))
        self._most = max(self._most, live + need)

    def undisturbed(self, index: int, operator: Any) -> bool:
        """Say, before an operator, whether all is as it was at this place before."""
        session, counter = self.session, self.session.counter
        live: int = counter.live.value
        if counter.peak.value > session.budget:
            calm = False
            session.steward.misjudged += 1  # the last operator ran unwatched
        elif index <= len(self._operators) and not session.between:
            expected, before = self._operators[index - 1]
            calm = operator is expected and live - before <= self._headroom
        else:
            if session.ledger.orphans:
                session.ledger.drain()
                session.end_if_idle()
            calm = live + session.steward.largest_need <= session.budget
        if not calm:
            self.wake()
        return calm

    def follows(self, value: Value) -> bool:
        """Say whether a newly saved value is the one that was saved here before."""
        slot = self._slot
        self._slot += 1
        if slot < len(self._sizes) and self._sizes[slot] == value.nbytes:
            value.birth = self.session.recorder.index
            return True
        self.wake()
        return False

    def begin(self) -> None:
        """Note that an iteration begins."""
        self._slot, self._ran, self._most = 0, [], 0

    def value_of(self, tensor: torch.Tensor) -> Value:
        """Return the current value of a storage whose writes passed unseen."""
        value = self.session.table.value_of(tensor)
        storage, version = tensor.untyped_storage(), tensor._version
        resized = value.nbytes != storage.nbytes()
        if resized or value.version != version:
            if resized or value.saved:
                value = self.session.table.begin(storage)
            value.version, value.kept_because, value.op = version, None, None
        return value
