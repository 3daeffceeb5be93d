"""What a run has learnt, kept for the next: its iterations, their plans, the needs.

A plan is advice: whatever stands in it, values leave and return bit for bit, and the
budget is kept by the steward. So a plan that does not suit costs time at most. Still
it is refused, and what differs is named: at once where versions, device, policy or
budget differ, and when the first iteration ends where that resembles none of the plan.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from lowtide import archive
from lowtide.errors import LowtideError
from lowtide.plan import ITERATIONS, NEEDS, SAVED, Learnt
from lowtide.planner.planner import Frontier
from lowtide.planner.recompute import Lineage
from lowtide.runtime.estimate import Signature
from lowtide.runtime.iterations import KNOWN, REPLANS, Forecast, Iterations, allowed
from lowtide.runtime.signature import Told, number_of, prefixes_of
from lowtide.scheduler.director import Lanes, Rules
from lowtide.tidefile import TideError
from lowtide.trace import OPS, VALUES, Trace
from lowtide.units import format_bytes
from lowtide.version import VERSION

# -- writing --------------------------------------------------------------------------


def learnt_of(
    iterations: Iterations, needs: Mapping[Signature, int], device: str
) -> Learnt:
    """Sum up what a session has learnt.

    Raises:
        LowtideError: no iteration has ended yet.
    """
    forecasts = iterations.known
    if not forecasts:
        raise LowtideError(
            "there is no plan to save: no forward and backward pass has ended within "
            "this budget."
        )
    told: dict[str, int] = {}
    heads = np.zeros(len(forecasts), ITERATIONS)
    saved, parents, codes = [], [], []
    for i, forecast in enumerate(forecasts):
        frontier = forecast.frontier
        plans = frontier.plans if frontier.searched else np.zeros((0, 0), np.int8)
        rows = np.zeros(len(forecast.told), SAVED)
        rows["number"] = [number for number, _ in forecast.told]
        rows["told"] = [told.setdefault(text, len(told)) for _, text in forecast.told]
        rows["parents"] = np.diff(frontier.lineage.first)
        rows["held"] = frontier.held
        saved.append(rows)
        parents.append(frontier.lineage.parents)
        codes.append(plans.ravel())
        lanes = frontier.lanes
        lengths = len(forecast.trace.ops), len(rows), len(plans)
        heads[i] = (forecast.base, lanes.write, lanes.read, *lengths)
    return Learnt(
        lowtide=VERSION,
        torch=str(torch.__version__),
        device=device,
        policy=iterations.rules.name,
        budget_bytes=iterations.budget,
        iterations=heads,
        ops=_joined((f.trace.ops for f in forecasts), OPS),
        values=_joined((f.trace.values for f in forecasts), VALUES),
        saved=_joined(saved, SAVED),
        parents=_joined(parents, np.int32),
        codes=_joined(codes, np.int8),
        needs=np.array(
            [(number_of(str(key)), need) for key, need in needs.items()], NEEDS
        ),
        told=tuple(told),
    )


def _joined(tables: Iterable[Any], dtype: Any) -> Any:
    return np.concatenate([np.zeros(0, dtype), *tables]).astype(dtype)


# -- reading --------------------------------------------------------------------------


def read_learnt(path: str | os.PathLike[str]) -> Learnt:
    """Read what a run has learnt.

    Raises:
        TideError, OSError: it cannot be read, or holds something else.
    """
    noun = archive.load(path)
    if not isinstance(noun, Learnt):
        kind = type(noun).__name__.lower()
        raise TideError(
            f"holds a {kind}, not the plans of a run: write these with "
            "`lowtide run --save-plan FILE`",
            path=path,
        )
    texts = (noun.lowtide, noun.torch, noun.device, noun.policy)
    if type(noun.budget_bytes) is not int or not isinstance(noun.told, tuple):
        raise TideError("is damaged: its facts are of other types", path=path)
    if not all(isinstance(text, str) for text in (*texts, *noun.told)):
        raise TideError("is damaged: its facts are of other types", path=path)
    return noun


def refuse_foreign(
    learnt: Learnt, *, device: str, policy: str, budget_bytes: int
) -> None:
    """Refuse plans that were made for something else, and say for what.

    Raises:
        LowtideError: says all that differs.
    """
    facts = [
        ("lowtide", learnt.lowtide, VERSION),
        ("torch", learnt.torch, str(torch.__version__)),
        ("device", learnt.device, device),
        ("policy", learnt.policy, policy),
        (
            "budget",
            f"{learnt.budget_bytes} bytes ({format_bytes(learnt.budget_bytes)})",
            f"{budget_bytes} bytes ({format_bytes(budget_bytes)})",
        ),
    ]
    other = [f"{what} {made}, not {now}" for what, made, now in facts if made != now]
    if other:
        raise LowtideError(
            f"this plan was made for {'; '.join(other)}. Learn a new one with "
            "`lowtide run --save-plan FILE`."
        )


def forecasts_of(
    learnt: Learnt, rules: Rules, swap_bytes: int | None = None
) -> list[Forecast]:
    """Make the iterations of a plan ready to be followed.

    Raises:
        TideError: they contradict themselves.
    """
    try:
        return list(_forecasts(learnt, rules, swap_bytes))
    except (ValueError, IndexError, TypeError, OverflowError) as error:
        raise TideError(f"is damaged: {error}") from None


def _forecasts(
    learnt: Learnt, rules: Rules, swap_bytes: int | None
) -> Iterable[Forecast]:
    heads = learnt.iterations
    if not 0 < len(heads) <= KNOWN:
        raise ValueError(f"it has {len(heads)} iterations, not 1 to {KNOWN}")
    for name in ("ops", "values", "plans"):
        if len(heads) and heads[name].min() < 0:
            raise ValueError("an iteration has less than nothing")
    ops = _cut(learnt.ops, heads["ops"])
    values = _cut(learnt.values, heads["values"])
    saved = _cut(learnt.saved, heads["values"])
    parents = _cut(learnt.parents, [int(rows["parents"].sum()) for rows in saved])
    counts = heads["plans"].astype(np.int64) * heads["values"]
    codes = _cut(learnt.codes, counts)
    for i, head in enumerate(heads):
        _check_trace(ops[i], values[i])
        if saved[i]["parents"].min(initial=0) < 0 or len(parents[i]) > 1 << 24:
            raise ValueError("its lineage is none")
        first = np.concatenate(([0], np.cumsum(saved[i]["parents"]))).astype(np.int32)
        told = _told(saved[i], learnt.told)
        key = prefixes_of([number for number, _ in told])[-1]
        trace = Trace(ops[i], values[i], key)
        frontier = Frontier(
            trace,
            Lanes(float(head["write"]), float(head["read"])),
            allowed(rules, swap_bytes),
            lineage=Lineage(first, np.ascontiguousarray(parents[i])),
            held=np.ascontiguousarray(saved[i]["held"]),
        )
        if head["plans"]:
            frontier.reuse(codes[i].reshape(int(head["plans"]), int(head["values"])))
        yield Forecast(
            trace=trace,
            base=int(head["base"]),
            frontier=frontier,
            told=told,
            seen=REPLANS,
        )


def _told(saved: Any, texts: tuple[str, ...]) -> list[Told]:
    """Look up what is told of each saved value."""
    if saved["told"].min(initial=0) < 0 or saved["told"].max(initial=0) >= len(texts):
        raise ValueError("it says nothing of a saved value")
    return [Told(int(row["number"]), texts[row["told"]]) for row in saved]


def _cut(table: Any, lengths: Any) -> list[Any]:
    """Part a table into the rows of each iteration."""
    ends = np.concatenate(([0], np.cumsum(np.asarray(lengths, np.int64))))
    if ends[-1] != len(table):
        raise ValueError("its tables do not belong together")
    return [table[start:stop] for start, stop in pairwise(ends.tolist())]


def _check_trace(ops: Any, values: Any) -> None:
    """Refuse an iteration that could not have been."""
    n, far = len(ops), 1 << 50
    if not n or not len(values):
        raise ValueError("an iteration is empty")
    for name in ("live", "need", "managed", "absent"):
        if not ((ops[name] >= -far) & (ops[name] <= far)).all():
            raise ValueError(f"an operator has impossible bytes ({name})")
    inside = (values["saved"] >= 0) & (values["saved"] <= n)
    inside &= (values["first_use"] >= -1) & (values["first_use"] <= n)
    sized = (values["bytes"] >= 0) & (values["bytes"] <= far)
    sized &= (values["scratch"] >= 0) & (values["scratch"] <= far)
    timed = np.isfinite(ops["seconds"]).all() and np.isfinite(values["seconds"]).all()
    if not (inside & sized).all() or not timed:
        raise ValueError("a value lies outside of its iteration")
    if ops["seconds"].min() < 0 or values["seconds"].min() < 0:
        raise ValueError("time runs backwards in it")


# -- what does not suit ---------------------------------------------------------------


class Followed:
    """A plan that a session follows from its first iteration on."""

    def __init__(self, learnt: Learnt, rules: Rules, swap_bytes: int | None) -> None:
        self._forecasts = forecasts_of(learnt, rules, swap_bytes)
        self._needs = {int(row["operator"]): int(row["bytes"]) for row in learnt.needs}
        self._judged = False

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        rules: Rules,
        *,
        device: str,
        budget_bytes: int,
        swap_bytes: int | None = None,
    ) -> Followed:
        """Read a plan for a session.

        Raises:
            LowtideError: it was made for something else, or is damaged; says what.
        """
        learnt = read_learnt(path)
        try:
            refuse_foreign(
                learnt, device=device, policy=rules.name, budget_bytes=budget_bytes
            )
            return cls(learnt, rules, swap_bytes)
        except TideError as error:
            raise TideError(error.why, path=path) from None
        except LowtideError as error:
            raise LowtideError(f"{os.fspath(path)}: {error}") from None

    def teach(self, iterations: Iterations) -> None:
        """Have the iterations of the plan known before any is seen."""
        for forecast in self._forecasts:
            iterations.adopt(forecast)

    def need(self, signature: Signature, estimate: int) -> int:
        """Return what an operator needed when the plan was learnt, or an estimate."""
        return max(0, self._needs.get(number_of(str(signature)), estimate))

    def judge(self, told: list[Told]) -> str | None:
        """Judge by the first iteration; returns what differs where all does."""
        if self._judged:
            return None
        self._judged = True
        sequences = [forecast.told for forecast in self._forecasts]
        if told in sequences:
            return None
        nearest = max(sequences, key=lambda other: _common(told, other))
        at = _common(told, nearest)
        here, there = (
            sequence[at].text if at < len(sequence) else "none"
            for sequence in (told, nearest)
        )
        return (
            "the plan given was made for another model, shape or mode, and is not "
            f"followed: saved tensor {at} is {here}, in the plan {there}. This run "
            "learns its own."
        )


def _common(one: list[Told], other: list[Told]) -> int:
    """Count the values with which both begin alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
