"""A session: one budget in force, from `with lowtide.budget(...)` to its end.

It joins the parts: the recorder tells it of every operator, the hooks of every saved
tensor; it makes room before operators run, starts copies early, prefetches, finds
iterations, and says at the end what happened.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide.errors import BudgetError, LowtideError
from lowtide.recorder.dispatch import Recorder
from lowtide.recorder.values import StorageTable, Value, replay_cost
from lowtide.runtime import allocator
from lowtide.runtime.devices import (
    resolve_budget,
    resolve_device,
    resolve_limit,
    total_memory,
)
from lowtide.runtime.estimate import Signature, estimate_need, signature_of
from lowtide.runtime.hooks import Hooks
from lowtide.runtime.iterations import Iterations
from lowtide.runtime.ledger import Ledger
from lowtide.runtime.replay import Replayer
from lowtide.runtime.transfers import DiskLane
from lowtide.runtime.verify import Verifier
from lowtide.scheduler.director import RULES, Lanes
from lowtide.scheduler.scheduler import Scheduler
from lowtide.timeline import Kept, Timeline
from lowtide.units import format_bytes

_MARGIN = 1.005  # the smallest budget named, above the largest working set seen
_LEARNING = 2  # steps that may measure on after an operator did not fit
_LONGEST = 200_000  # operators after which an iteration is ended in any case

_active: Session | None = None
_lingering: list[Session] = []  # ended, but a graph still has tensors on disk


def budget(
    size: int | str,
    *,
    device: str | None = None,
    host: int | str = "auto",
    disk: int | str = "auto",
    policy: str = "auto",
    verify: bool = False,
    spill_dir: str | os.PathLike[str] | None = None,
) -> Session:
    """Keep what runs inside within a budget of memory, results unchanged.

    Arguments:
        size: the budget: bytes, "8GiB", "75%" of the device's memory (of the
            cgroup's limit where there is one), or "auto" (what is free now, less a
            reserve).
        device: whose memory; the CPU's where None.
        host: bytes of host memory for tensors that leave a device. On the CPU the
            device is the host, so it has no effect.
        disk: bytes of disk for tensors that leave; "auto" sets no limit, 0 forbids it.
        policy: "auto", "keep", "swap-only", "recompute-only" or "random".
        verify: check, in the first two iterations, that every tensor that left comes
            back with the same bits.
        spill_dir: where the spill file goes.

    Returns a context manager; `b.step()` marks an iteration by hand (rarely needed),
    `b.report()` gives the Timeline.

    Raises:
        SizeError: a malformed size.
        LowtideError: a budget inside a budget, an unknown policy, an unserved device.
        BudgetError: inside the block, when the budget cannot be kept.
    """
    return Session(
        size,
        device=device,
        host=host,
        disk=disk,
        policy=policy,
        verify=verify,
        spill_dir=spill_dir,
    )


class Session:
    """One budget in force. See `budget`; the other arguments serve tests.

    Arguments:
        force: release every saved tensor that may leave at once, budget or not.
        seed: of the "random" policy.
        measure_floor: find the floor exactly, at some cost per operator.
        on_progress: called with one line of text now and then while learning.
    """

    def __init__(
        self,
        size: int | str,
        *,
        device: str | None = None,
        host: int | str = "auto",
        disk: int | str = "auto",
        policy: str = "auto",
        verify: bool = False,
        spill_dir: str | os.PathLike[str] | None = None,
        force: bool = False,
        seed: int = 0,
        measure_floor: bool = False,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        if policy not in RULES:
            raise LowtideError(
                f"policy {policy!r} is unknown. Choose one of {', '.join(RULES)}."
            )
        self.device_type = resolve_device(device)
        self.budget = resolve_budget(size)
        resolve_limit(host, total=total_memory())
        self.disk_limit = resolve_limit(disk, total=total_memory())
        self.spill_dir = None if spill_dir is None else Path(spill_dir)
        self.rules = RULES[policy]
        self.verify = verify
        self.forced = force
        self.seed = seed
        self.measure_floor = measure_floor
        self.on_progress = on_progress
        self.live = False

    # -- entering and leaving ---------------------------------------------------

    def __enter__(self) -> Session:
        """Put the budget in force."""
        global _active
        if _active is not None and _active.live:
            raise LowtideError(
                "a budget is already in force here: put one `with lowtide.budget(...)` "
                "around the whole program, not one inside another."
            )
        for ended in list(_lingering):
            ended.close_when_idle()
        self.counter = allocator.install()
        self.adopted = allocator.adopt(self.counter)
        self._build()
        self._attach()
        _active = self
        self.live = True
        return self

    def _build(self) -> None:
        lane = None
        if self.rules.swap and self.disk_limit != 0:
            lane = DiskLane(self.spill_dir, limit_bytes=self.disk_limit)
        self.lane = lane
        lanes = Lanes(
            write=lane.write_bandwidth if lane else 0.0,
            read=lane.read_bandwidth if lane else 0.0,
        )
        self.table = StorageTable()
        self.scheduler: Scheduler[Value] = Scheduler(
            self.rules, lanes, force=self.forced, seed=self.seed
        )
        self.ledger = Ledger(
            self.budget, self.counter, lane, self.scheduler, self.table
        )
        self.replayer = Replayer(self.ledger)
        self.ledger.replay = self.replayer
        if self.verify:
            self.ledger.verifier = Verifier()
        self.iterations = Iterations(self.budget, lanes, self.rules)
        self.ledger.replay_fits = self._replay_fits
        self.recorder = Recorder(self.table, self, self.device_type)
        self.hooks = Hooks(self)
        self._needs: dict[Signature, int] = {}
        self._largest_need = 0
        self._between = True  # no saved tensor yet in this iteration
        self._era = 0
        self._overrun = False  # measuring on although an operator did not fit
        self._failed = False  # a BudgetError is on its way out
        self.misjudged = 0
        self.floor = 0
        self._floor_operator = ""
        self.steps = 0
        self._leader: int | None = None
        self._step_ends: list[float] = []
        self._whole: dict[str, tuple[int, int, str]] = {}
        self.first_peak = self.later_peak = 0
        self.plain_peak = 0
        self.static = 0
        self.decide_seconds = 0.0
        self._totals: dict[str, float] = {}
        self._marks = (0.0, 0.0, 0, 0.0)
        self.counter.reset_peak()

    def _attach(self) -> None:
        """Hook into torch: mode, saved tensors, optimizers, functorch, forks."""
        self.recorder.attach()
        torch._C._autograd._push_saved_tensors_default_hooks(
            self.hooks.pack, self.hooks.unpack
        )
        self._optimizer_hook = register_optimizer_step_post_hook(
            self._optimizer_stepped
        )
        self._disable = torch.autograd.graph.disable_saved_tensors_hooks
        torch.autograd.graph.disable_saved_tensors_hooks = _suspending(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the budget out of force; what is swapped out is brought back."""
        global _active
        if self.recorder.enabled:
            self._finish_iteration()
        self.live = False
        _active = None
        torch.autograd.graph.disable_saved_tensors_hooks = self._disable
        torch._C._autograd._pop_saved_tensors_default_hooks()
        self._optimizer_hook.remove()
        self.recorder.detach()
        if not self.recorder.enabled:
            return  # a forked child: nothing here is its own
        self._summary = self._summarize()
        self._settle(failed=kind is not None)
        if kind is None and self._overrun:
            self._raise_smallest()

    def _settle(self, *, failed: bool) -> None:
        """Leave graphs that outlive the session whole.

        What is on disk can be read back later. What was dropped is computed now, since
        later writes to what it is made from would go unseen; after an exception it is
        given up instead: the graph is most likely never used again.
        """
        ledger = self.ledger
        ledger.budget = 1 << 62
        ledger.drain()
        for value in sorted(ledger.alive, key=lambda v: v.birth):
            if value.dropped and not failed:
                ledger.bring_back(value)
        self.close_when_idle()

    def close_when_idle(self) -> None:
        """Close the lane once no graph needs what is on disk any more."""
        self.ledger.drain()
        if self.lane is None:
            return
        if any(value.away and not value.dropped for value in self.ledger.alive):
            if self not in _lingering:
                _lingering.append(self)
            return
        self.lane.close()
        if self in _lingering:
            _lingering.remove(self)

    # -- what the recorder tells ------------------------------------------------

    def before(self, func: Any, args: Any, kwargs: Any) -> tuple[int, Any]:
        """Make room for an operator; returns the live bytes and its signature."""
        ledger, counter = self.ledger, self.counter
        if ledger.orphans:
            ledger.drain()
            if not ledger.alive and not self._between:
                self._finish_iteration()
        signature = None
        self._current_need = self._largest_need
        if self.forced:
            ledger.force()
        elif counter.live.value + self._largest_need > self.budget or self.steps < 2:
            signature = self._reserve(func, args, kwargs)
        if self.scheduler.to_write and not self.forced:
            self._write_early()
        if self.scheduler.absent and not self.forced:
            self._prefetch()
        if self.measure_floor:
            self._pinned = self._measure_pinned()
        live = counter.live.value
        counter.op_peak.value = live
        return live, signature

    def _reserve(self, func: Any, args: Any, kwargs: Any) -> Signature | None:
        """Free what the operator needs, where it is not free already."""
        start = perf_counter()
        try:
            signature = signature_of(func, args, kwargs)
            need = self._needs.get(signature)
        except TypeError:
            signature, need = None, None  # an argument that cannot be hashed
        exact = need is not None
        live = self.counter.live
        if need is not None:
            self._current_need = need
            if live.value + self._largest_need <= self.budget:
                return signature
        if need is None:
            if live.value <= 0.5 * self.budget and not self._overrun:
                return signature
            need = estimate_need(func, args, kwargs)
        self._current_need = need
        if self._overrun:
            self.ledger.make_room(1 << 61)
        elif live.value + need > self.budget:
            waited = self.ledger.exposed
            fits = self.ledger.make_room(need)
            self.decide_seconds -= self.ledger.exposed - waited
            if not fits and exact:
                self._short(str(func), live.value + need)
        self.decide_seconds += perf_counter() - start
        return signature

    def after(self, func: Any, token: tuple[int, Any], seconds: float) -> int:
        """Note an operator's end; returns the bytes it needed."""
        live, signature = token
        peak = self.counter.op_peak.value
        need = peak - live
        if signature is not None:
            if need > self._needs.get(signature, -1):
                self._needs[signature] = need
            if need > self._largest_need:
                self._largest_need = need
        if not self._between:
            ledger = self.ledger
            self.iterations.ops.append(
                (seconds, live, need, ledger.managed, ledger.absent)
            )
            if len(self.iterations.ops) > _LONGEST:
                self._finish_iteration()
        if peak > self.budget and not self.forced:
            self._exceeded(str(func), live, int(need))
        if self.measure_floor and self._pinned + need > self.floor:
            self.floor = self._pinned + need
            self._floor_operator = str(func)
        return int(need)

    def before_write(self, value: Value) -> None:
        """Save what is owed of a value that is about to be overwritten."""
        self.ledger.before_write(value)

    # -- what the hooks tell ----------------------------------------------------

    def note_saved(self, value: Value) -> None:
        """A value was saved that was not saved before."""
        if self._between:
            self._begin_iteration()
        position = self.recorder.index
        planned = self.iterations.saved(value, position)
        if self.forced:
            planned = None
        elif value.op is None and planned is None:
            planned = 0  # a source is most often a parameter: only under pressure
        value.slot_era = self._era
        self.ledger.adopt(value, planned)

    def note_use(self, value: Value) -> None:
        """Autograd asks for a value."""
        self.iterations.use(value, self.recorder.index)

    def keep_whole(self, tensor: torch.Tensor) -> None:
        """A tensor that lowtide does not move was saved."""
        kind = type(tensor).__name__
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            kind = f"{tensor.layout}, {tensor.dtype}, {tensor.device.type}"
        tensors, n_bytes, example = self._whole.get(kind, (0, 0, str(tensor.shape)))
        with suppress(RuntimeError):  # some subclasses have no size of their own
            n_bytes += tensor.numel() * tensor.element_size()
        self._whole[kind] = (tensors + 1, n_bytes, example)

    # -- lanes ------------------------------------------------------------------

    def _write_early(self) -> None:
        """Start planned copies; without a plan only once memory fills."""
        planned = self.iterations.forecast is not None
        if planned or self.counter.live.value > 0.6 * self.budget:
            self.ledger.early_writes()

    def _prefetch(self) -> None:
        """Read ahead what will be asked for next, where it fits all the way."""
        if torch.is_grad_enabled() or self._overrun:
            return
        position = self.recorder.index - 1  # of the operator about to run
        live = self.counter.live.value
        for value in self.scheduler.returns(position):
            if value.reading is not None:
                continue
            load = self.iterations.load_between(
                position, max(value.next_use, position) + 1
            )
            if load is None:
                room = self.budget - live - 2 * self._largest_need
            else:
                managed = self.ledger.managed + self.reading_bytes()
                room = self.budget - load - managed
            room = min(room, self.budget - live - self._current_need)
            if value.nbytes > room or not value.clean:
                return
            self.ledger.start_read(value)
            live += value.nbytes

    def reading_bytes(self) -> int:
        """Return the bytes of prefetches under way."""
        return sum(
            v.nbytes for v in self.scheduler.absent.values() if v.reading is not None
        )

    def _measure_pinned(self) -> int:
        """Return the live bytes that could not leave at this moment."""
        ledger = self.ledger
        movable = sum(
            v.nbytes for v in ledger.alive if v.reading is not None or ledger.movable(v)
        )
        movable += sum(v.nbytes for _, v, _ in ledger.flights if v not in ledger.alive)
        return int(self.counter.live.value - movable)

    def _replay_fits(self, value: Value) -> bool:
        """Say whether a value could be computed again when it is wanted.

        A replay needs its inputs and outputs beside what is there then. Where that
        would not fit, a copy is the only way back.
        """
        if self.lane is None or self.forced:
            return True
        scratch = replay_cost(value)[1]
        use = value.next_use
        load = self.iterations.load_between(use, use + 1) if use >= 0 else None
        if load is None:
            load = self.counter.live.value - self.ledger.managed + self._largest_need
        return load + scratch <= self.budget

    # -- iterations -------------------------------------------------------------

    def step(self) -> None:
        """Mark the end of an iteration by hand."""
        self._step_done()

    def _optimizer_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.live or not self.recorder.enabled:
            return
        if self._leader is None:
            self._leader = id(optimizer)
        if id(optimizer) == self._leader:
            self._step_done()

    def _step_done(self) -> None:
        self.steps += 1
        self._step_ends.append(perf_counter())
        self.ledger.drain()
        alive = self.ledger.alive
        if not self._between and all(v.slot_era < self._era for v in alive):
            self._finish_iteration()
        self._era += 1
        self._note_peak()
        if self._overrun and self.steps >= _LEARNING:
            self._raise_smallest()

    def _note_peak(self) -> None:
        peak = self.counter.peak.value
        if self.first_peak == 0:
            self.first_peak = peak
        else:
            self.later_peak = max(self.later_peak, peak)
        self.counter.reset_peak()
        if self.on_progress is not None and self.steps <= 3:
            self.on_progress(
                f"step {self.steps}: peak {format_bytes(peak)} of "
                f"{format_bytes(self.budget)}"
            )

    def _begin_iteration(self) -> None:
        self._between = False
        self.recorder.index = 0
        live = self.counter.live.value
        self.static = live
        self._update_lanes()
        self.iterations.begin(live)

    def _update_lanes(self) -> None:
        if self.lane is None:
            return
        lanes = Lanes(self.lane.write_bandwidth, self.lane.read_bandwidth)
        self.scheduler.lanes = self.iterations.lanes = lanes

    def _finish_iteration(self) -> None:
        """Close the iteration: remember it, cut lineage that nobody needs."""
        self._between = True
        for value in self.table.values():
            if value.op is not None and not value.pins and not value.saved:
                value.op = None
        start = perf_counter()
        forecast = self.iterations.finish()
        self.decide_seconds += perf_counter() - start
        if forecast is not None:
            trace = forecast.trace
            self.plain_peak = max(self.plain_peak, trace.plain_peak_bytes)
            self._total_up()
        self.iterations.begin(self.counter.live.value)

    def _total_up(self) -> None:
        """Keep the figures of the last full iteration."""
        ledger, replayer = self.ledger, self.replayer
        exposed, replayed, n_bytes, decided = self._marks
        saved = sum(v.nbytes for v in self.iterations.slots)
        self._totals = {
            "saved": saved,
            "swapped": ledger.swapped_bytes,
            "recomputed": replayer.bytes - n_bytes,
            "exposed": ledger.exposed - exposed,
            "replay": replayer.seconds - replayed,
            "decide": self.decide_seconds - decided,
        }
        if ledger.swapped_bytes or ledger.dropped_bytes:
            self.moved = True
        ledger.swapped_bytes = ledger.dropped_bytes = 0
        self._marks = (
            ledger.exposed,
            replayer.seconds,
            replayer.bytes,
            self.decide_seconds,
        )

    moved = False

    # -- budgets that cannot be kept --------------------------------------------

    def _exceeded(self, operator: str, live: int, need: int) -> None:
        """The budget was exceeded: by a need not known before, or for want of room."""
        if not self._overrun:
            pinned = min(live, self._measure_pinned())
            if pinned + need <= self.budget:
                self.misjudged += 1  # the need is known from now on
                return
            live = pinned
        self._short(operator, live + need)

    def _short(self, operator: str, needed: int) -> None:
        """An operator cannot fit: measure on while learning, else stop here."""
        if self._failed:
            return
        if needed > self.floor:
            self.floor, self._floor_operator = needed, operator
        if self.steps >= _LEARNING and not self._overrun:
            self._failed = True
            raise BudgetError(
                budget_bytes=self.budget,
                operator=operator,
                needed_bytes=needed,
                smallest_bytes=None,
            )
        self._overrun = True

    def _raise_smallest(self) -> None:
        self._overrun = False
        self._failed = True
        raise BudgetError(
            budget_bytes=self.budget,
            operator=self._floor_operator,
            needed_bytes=self.floor,
            smallest_bytes=self.smallest,
        )

    @property
    def smallest(self) -> int:
        """The smallest budget that works, as far as seen; 0 while unknown."""
        return int(self.floor * _MARGIN) if self.floor else 0

    # -- report -----------------------------------------------------------------

    def report(self) -> Timeline:
        """Return what happened so far."""
        return self._summarize() if self.live else self._summary

    def _summarize(self) -> Timeline:
        self._note_last_peak()
        ends = self._step_ends
        gaps = [b - a for a, b in pairwise(ends)]
        totals = self._totals
        last = self.iterations.last
        lane = self.lane
        saved = int(totals.get("saved", 0))
        swapped = int(totals.get("swapped", 0))
        recomputed = int(totals.get("recomputed", 0))
        verifier = self.ledger.verifier
        return Timeline(
            policy=self.rules.name,
            allocator=self.counter.name,
            budget_bytes=self.budget,
            plain_peak_bytes=self._plain_peak(),
            plain_peak_known=not self.moved,
            static_bytes=self.static,
            floor_bytes=self.floor,
            smallest_bytes=self.smallest,
            planned_peak_bytes=last.planned_peak if last is not None else 0,
            peak_bytes=self.later_peak or self.first_peak,
            first_peak_bytes=self.first_peak,
            steps=self.steps,
            step_seconds=median(gaps) if gaps else 0.0,
            trained=self.iterations.finished > 0,
            saved_bytes=saved,
            kept_bytes=max(0, saved - swapped - recomputed),
            swapped_bytes=swapped,
            recomputed_bytes=recomputed,
            exposed_seconds=totals.get("exposed", 0.0),
            replay_seconds=totals.get("replay", 0.0),
            decide_seconds=totals.get("decide", 0.0),
            written_bytes=lane.written_bytes if lane is not None else 0,
            read_bytes=lane.read_bytes if lane is not None else 0,
            verified_tensors=verifier.checked if verifier is not None else 0,
            kept=self._kept(),
            notes=tuple(self.ledger.complaints.values()),
        )

    def _note_last_peak(self) -> None:
        peak = self.counter.peak.value
        if self.first_peak == 0 or self.steps == 0:
            self.first_peak = max(self.first_peak, peak)
        elif self.live:
            self.later_peak = max(self.later_peak, peak)

    def _plain_peak(self) -> int:
        if not self.moved:
            return max(self.plain_peak, self.first_peak, self.later_peak)
        return self.plain_peak

    def _kept(self) -> tuple[Kept, ...]:
        rows = []
        for kind, (tensors, n_bytes, example) in self._whole.items():
            reason = f"not a plain dense tensor ({kind})"
            rows.append(Kept(reason, tensors, n_bytes, example))
        return tuple(rows)


def _suspending(session: Session) -> Any:
    """Wrap torch's switch that forbids saved-tensor hooks (torch.func uses it).

    It refuses while hooks are in force, so ours step aside for its duration: inside,
    tensors are kept as plain PyTorch keeps them.
    """
    original = torch.autograd.graph.disable_saved_tensors_hooks

    class Suspending:
        def __init__(self, message: str) -> None:
            self._inner = original(message)

        def __enter__(self) -> None:
            self._popped = _top_is_ours(session)
            if self._popped:
                torch._C._autograd._pop_saved_tensors_default_hooks()
            self._inner.__enter__()

        def __exit__(self, *details: Any) -> None:
            self._inner.__exit__(*details)
            if self._popped:
                torch._C._autograd._push_saved_tensors_default_hooks(
                    session.hooks.pack, session.hooks.unpack
                )

    return Suspending


def _top_is_ours(session: Session) -> bool:
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and top[0] == session.hooks.pack


def _after_fork() -> None:
    """Switch lowtide off in a forked child: its lanes' threads are not there."""
    if _active is not None:
        _active.live = False
        _active.recorder.enabled = False


os.register_at_fork(after_in_child=_after_fork)
