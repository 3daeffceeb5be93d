"""A session: one budget in force, from `with lowtide.budget(...)` to its end.

It joins the parts: the recorder tells the steward of every operator, the hooks tell
of every saved tensor, and from both it finds where an iteration begins and ends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide import archive
from lowtide.errors import BudgetError, LowtideError
from lowtide.frames import hide_frames
from lowtide.recorder.dispatch import Recorder
from lowtide.recorder.storages import StorageTable
from lowtide.recorder.values import Value
from lowtide.runtime.account import Account
from lowtide.runtime.allocator import NativeCounter
from lowtide.runtime.arena import Pool
from lowtide.runtime.devices import (
    device_clock,
    install_counter,
    resolve_budget,
    resolve_device,
    resolve_tiers,
)
from lowtide.runtime.functorch import suspending
from lowtide.runtime.hooks import Hooks
from lowtide.runtime.iterations import Iterations
from lowtide.runtime.lanes import Lane, open_lane, swap_limit
from lowtide.runtime.learnt import Followed, learnt_of
from lowtide.runtime.ledger import Ledger
from lowtide.runtime.replay import Replayer
from lowtide.runtime.rest import Rest
from lowtide.runtime.steward import Steward
from lowtide.runtime.streams import streams_of
from lowtide.runtime.verify import Verifier
from lowtide.scheduler.director import RULES, Lanes
from lowtide.scheduler.scheduler import Scheduler
from lowtide.timeline import RUNNING, Timeline, outcome_of
from lowtide.units import format_bytes
from lowtide.version import VERSION

_LONGEST = 200_000  # operators after which an iteration is ended in any case
_VERIFIED = 2  # iterations that `verify` looks at

_active: Session | None = None
_lingering: list[Session] = []  # ended, but a graph still has tensors on disk


def budget(
    size: int | str,
    *,
    device: str | None = None,
    host: int | str = "auto",
    disk: int | str = "auto",
    disk_writes: int | str | None = None,
    policy: str = "auto",
    verify: bool = False,
    spill_dir: str | os.PathLike[str] | None = None,
    pool: bool = False,
    plan: str | os.PathLike[str] | None = None,
) -> Session:
    """Keep what runs inside within a budget of memory, results unchanged.

    Arguments:
        size: the budget: bytes, "8GiB", "75%" of the device's memory (of the
            cgroup's limit where there is one), or "auto" (what is free now, less a
            reserve).
        device: whose memory; the CPU's where None.
        host: bytes of host memory for tensors that leave a device; "auto" is what is
            free, less a reserve. On the CPU the device is the host, so it has no
            effect.
        disk: bytes of disk for tensors that leave; "auto" sets no limit, 0 forbids it.
            Where several ranks share the machine, a percentage or "auto" is this
            rank's part; bytes are bytes.
        disk_writes: most bytes to write to the disk in one step, since every write
            wears an SSD; any amount where None.
        policy: "auto", or with one way out only "swap-only" and "recompute-only", or
            none, "keep". Published ones, to compare with: "delta", "delta-knapsack",
            "dtr", "dtr-local", "msps", "lru", "size". "random" serves tests.
        verify: check, in the first two iterations, that every tensor that left comes
            back with the same bits.
        spill_dir: where the spill file goes.
        pool: plan where memory goes from what iterations do, so that none of it is
            given back and taken again, and what the system sees stays within the
            budget as well. On the CPU, where lowtide's allocator is in use. Not by
            default yet: within a tight budget it costs more time than it saves.
        plan: a file that `b.save_plan(path)` wrote: what another run of this program
            has learnt within this budget is followed from the first step on. What it
            does not know is learnt as ever; the results do not depend on it.

    Returns a context manager; `b.step()` marks an iteration by hand (rarely needed),
    `b.report()` gives the Timeline.

    Raises:
        SizeError: a malformed size.
        LowtideError: a budget inside a budget, an unknown policy, an unserved device,
            a plan made for something else.
        BudgetError: inside the block, when the budget cannot be kept.
    """
    return Session(
        size,
        device=device,
        host=host,
        disk=disk,
        disk_writes=disk_writes,
        policy=policy,
        verify=verify,
        spill_dir=spill_dir,
        pool=pool,
        plan=plan,
    )


class Session:
    """One budget in force. See `budget`; the other arguments serve tests.

    Arguments:
        force: release every saved tensor that may leave at once, budget or not.
        seed: of the "random" policy.
        measure_floor: find the floor exactly, at some cost per operator.
        lane: what carries tensors away, in place of the disk.
        on_progress: called with one line of text now and then while learning.
    """

    def __init__(
        self,
        size: int | str,
        *,
        device: str | None = None,
        host: int | str = "auto",
        disk: int | str = "auto",
        disk_writes: int | str | None = None,
        policy: str = "auto",
        verify: bool = False,
        spill_dir: str | os.PathLike[str] | None = None,
        pool: bool = False,
        plan: str | os.PathLike[str] | None = None,
        force: bool = False,
        seed: int = 0,
        measure_floor: bool = False,
        lane: Lane | None = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        if policy not in RULES:
            raise LowtideError(
                f"policy {policy!r} is unknown. Choose one of {', '.join(RULES)}."
            )
        self.device_type = resolve_device(device)
        self.budget = resolve_budget(size, self.device_type)
        self.tiers = resolve_tiers(
            device=self.device_type,
            host=host,
            disk=disk,
            disk_writes=disk_writes,
            directory=None if spill_dir is None else Path(spill_dir),
        )
        self._given_lane = lane
        self.rules = RULES[policy]
        self.followed: Followed | None = None
        if plan is not None:
            self.followed = Followed.open(
                plan,
                self.rules,
                device=self.device_type,
                budget_bytes=self.budget,
                swap_bytes=swap_limit(self.device_type, self.tiers),
            )
        self.verify = verify
        self.pooled = pool
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
        self.counter = install_counter(self.device_type)
        self.counter.trim()
        self._build()
        self._attach()
        _active = self
        self.live = True
        return self

    def _build(self) -> None:
        streams, lane = streams_of(self.device_type), self._given_lane
        if lane is None and self.rules.swap:
            lane = open_lane(self.device_type, self.tiers, streams)
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
        self.ledger.device = self.device_type
        self.ledger.streams = streams
        if self.verify:
            self.ledger.verifier = Verifier()
        limit = swap_limit(self.device_type, self.tiers)
        self.iterations = Iterations(self.budget, lanes, self.rules, swap_bytes=limit)
        if self.followed is not None:
            self.followed.teach(self.iterations)
        self.account = Account(self)
        self.steward = Steward(self)
        self.ledger.replay_fits = self.steward.replay_fits
        self.ledger.short = self.steward.short
        self.ledger.postpone = self.steward.postpone
        self.ledger.starved = self.steward.starved
        self.ledger.hasten = self.iterations.hasten
        self.recorder = Recorder(self.table, self.steward, self.device_type)
        self.recorder.starved = self.steward.starved
        self.recorder.clock = device_clock(self.device_type)
        self.recorder.captured = None if streams is None else streams.capturing
        self.pool: Pool | None = None
        if self.pooled and isinstance(self.counter, NativeCounter):
            self.pool = Pool(self.counter, limit=self.budget)
            self.recorder.position = self.counter.op
        self.hooks = Hooks(self)
        self.rest = Rest(self)
        self.between = True  # no saved tensor yet in this iteration
        self._thread = threading.get_ident()  # the one that the budget is in force in
        self._era = 0  # optimizer steps so far
        self._leader: int | None = None  # the optimizer whose steps count
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
        torch.autograd.graph.disable_saved_tensors_hooks = suspending(
            self.hooks.pack, self.hooks.unpack
        )

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
        if error is not None:
            hide_frames(error)
        self.live = False
        _active = None
        torch.autograd.graph.disable_saved_tensors_hooks = self._disable
        torch._C._autograd._pop_saved_tensors_default_hooks()
        self._optimizer_hook.remove()
        self.recorder.detach()
        if not self.recorder.enabled:
            return  # a forked child: nothing here is its own
        self._summary = self.account.timeline(outcome_of(error))
        self._settle(failed=kind is not None)
        if self.pool is not None:
            self.pool.close()
        self.counter.trim()
        if kind is None:
            try:
                self.steward.give_up(ended=True)
            except BudgetError as shortage:
                self._summary = replace(
                    self._summary,
                    outcome=outcome_of(shortage),
                    smallest_bytes=self.steward.smallest,
                )
                raise

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

    # -- what the hooks tell ----------------------------------------------------

    def note_saved(self, value: Value) -> None:
        """A value was saved that was not saved before."""
        if self.between:
            self._begin_iteration()
        value.slot_era = self._era
        if self.recorder.resting is not None and self.rest.follows(value):
            self.ledger.adopt(value)
            return
        start, planning = perf_counter(), self.iterations.plan_seconds
        planned = self.iterations.saved(value, self.recorder.index)
        if self.forced:
            planned = None
        elif value.op is None and planned is None:
            planned = 0  # a source is most often a parameter: only under pressure
        self.ledger.adopt(value)
        if value.kept_because is None:
            self.scheduler.saved(value, planned)
        planning -= self.iterations.plan_seconds
        self.ledger.deciding += perf_counter() - start + planning

    def note_use(self, value: Value) -> None:
        """Autograd asks for a value."""
        if self.device_type == "cpu" and threading.get_ident() != self._thread:
            self.account.elsewhere = True  # on a device autograd has its own threads
        if self.live and self.iterations.used == 0:
            self.account.classify()
        self.iterations.use(value, self.recorder.index)

    # -- what the steward tells -------------------------------------------------

    def note_operator(self, func: Any, seconds: float, live: int, need: int) -> None:
        """An operator has run."""
        ledger, ops = self.ledger, self.iterations.ops
        arriving = ledger.arriving  # is in memory already, though not of use yet
        absent = ledger.absent - arriving
        self.account.reached(live + need + absent)
        if self.between:
            return
        self.rest.ran(func, live, need)
        ops.append((seconds, live, need, ledger.managed + arriving, absent))
        if len(ops) > _LONGEST:
            self._finish_iteration()

    def end_if_idle(self) -> None:
        """End the iteration where no saved tensor is left."""
        if not self.between and not self.ledger.alive:
            self._finish_iteration()

    # -- iterations -------------------------------------------------------------

    def step(self) -> None:
        """Mark the end of an iteration by hand."""
        self._step_done()

    def _optimizer_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.live or not self.recorder.enabled:
            return
        if threading.get_ident() != self._thread:
            self.account.elsewhere = True
            return
        if self._leader is None:
            self._leader = id(optimizer)
        if id(optimizer) == self._leader:
            self._step_done()

    def _step_done(self) -> None:
        self.ledger.drain()
        alive = self.ledger.alive
        if not self.between and all(v.slot_era < self._era for v in alive):
            self._finish_iteration()
        self._era += 1
        if self.lane is not None:
            self.lane.begin_step()
        peak = self.account.step()
        if self.recorder.resting is not None and peak > self.budget:
            self.steward.misjudged += 1  # by an operator that ran unwatched
            self.rest.wake()
        if self.on_progress is not None and self.account.steps <= 3:
            self.on_progress(
                f"step {self.account.steps}: peak {format_bytes(peak)} of "
                f"{format_bytes(self.budget)}"
            )
        self.steward.give_up()

    def _begin_iteration(self) -> None:
        self.between = False
        self.recorder.index = 0
        if self.pool is not None:
            self.pool.boundary()
        self.steward.recover()
        live = self.counter.live.value
        self.account.static = live
        self._update_lanes()
        self.iterations.begin(live)
        self.rest.begin()

    def _update_lanes(self) -> None:
        if self.lane is None:
            return
        lanes = Lanes(self.lane.write_bandwidth, self.lane.read_bandwidth)
        self.scheduler.lanes = self.iterations.lanes = lanes

    def _finish_iteration(self) -> None:
        """Close the iteration: remember it, cut lineage that nobody needs."""
        self.between = True
        if self.recorder.resting is not None:
            self.iterations.begin(self.counter.live.value)
            return
        for value in self.table.values():
            if value.op is not None and not value.pins and not value.saved:
                value.op = None
        start, planning = perf_counter(), self.iterations.plan_seconds
        forecast = self.iterations.finish()
        planning -= self.iterations.plan_seconds
        self.ledger.deciding += perf_counter() - start + planning
        moved = self.account.iteration(whole=forecast is not None)
        if forecast is not None:
            odd = self.followed.judge(forecast.told) if self.followed else None
            if odd is not None:
                self.ledger.complain("plan", odd)
        verifier = self.ledger.verifier
        if verifier is not None and self.iterations.finished >= _VERIFIED:
            verifier.enabled = False
        self.rest.consider(forecast, moved=moved)
        self.iterations.begin(self.counter.live.value)

    # -- report -----------------------------------------------------------------

    def report(self) -> Timeline:
        """Return what happened so far."""
        return self.account.timeline(RUNNING) if self.live else self._summary

    def save_plan(self, path: str | os.PathLike[str]) -> None:
        """Write what was learnt, for the `plan=` of a later run within this budget.

        Raises:
            LowtideError, OSError: nothing was learnt yet, or it cannot be written.
        """
        learnt = learnt_of(self.iterations, self.steward.needs, self.device_type)
        archive.save(path, learnt, written_by=f"lowtide {VERSION}")


def _after_fork() -> None:
    """Switch lowtide off in a forked child: its lanes' threads are not there."""
    if _active is not None:
        _active.live = False
        _active.recorder.enabled = False


os.register_at_fork(after_in_child=_after_fork)
