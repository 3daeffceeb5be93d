"""Every value that `benchmarks/paper.py` computes, as a job for some device."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness
from benchmarks.paper_subjects import (
    AUTHOR_RATIO,
    AUTHOR_ZERO,
    CIFAR,
    DATA,
    DTR,
    IMAGENET,
    LARGE,
    PARTS,
    PUBLISHED_BATCH,
    PUBLISHED_SAVED,
    Make,
)
from benchmarks.policies import cell
from benchmarks.swap import ITERATION_MS, read_recording
from lowtide.elsewhere.accesses import copy_cost, recording_of
from lowtide.elsewhere.batches import largest, near
from lowtide.elsewhere.contest import AUTO, Contest
from lowtide.elsewhere.retime import lanes_of, retime, usable_bytes
from lowtide.hardware import CATALOGUE, Hardware
from lowtide.history import History
from lowtide.planner.candidates import CopyCost, Recording
from lowtide.planner.pool import BLOCK, Pool, Search, place_blocks
from lowtide.planner.swap import autoswap
from lowtide.planner.unstalled import without_stall
from lowtide.recorder.files import read_history
from lowtide.recorder.steady import find_iteration
from lowtide.simulator.caching import MODELS, simulate_allocator
from lowtide.simulator.simulator import Outcome, simulate
from lowtide.simulator.watch import Watch
from lowtide.trace import Graph

Value = float | str | None

FIELDS = ("table", "model", "hardware", "policy", "measure", "at", "value", "published")
VARIATIONS = {
    "flops_down": (0.8, 1.0),
    "flops_up": (1.2, 1.0),
    "link_down": (1.0, 0.8),
    "link_up": (1.0, 1.2),
}
MOST_SLOWDOWN = 1.25
SCORES = ("AOA", "DOA", "WDOA", "SWDOA")
_HOPELESS = 2.0  # slow-down from which nobody asks how slow
_SAVED = 50  # percent: where the search for what can be saved begins
FINEST = 0.01  # how exactly largest batches are found, as a part of them


@dataclass(frozen=True, slots=True)
class Job:
    """One value to be computed, on the device that it is given."""

    table: str
    model: str
    hardware: str  # "" where no device plays a part
    policy: str
    measure: str
    at: str
    published: Value
    value: Callable[[Hardware], Value]

    def row(self, *, vary: bool) -> harness.Row:
        """Compute the value, and what it becomes on devices a little different."""
        device = CATALOGUE.get(self.hardware)
        row: harness.Row = {name: getattr(self, name) for name in FIELDS[:6]}
        nominal = device or CATALOGUE["gtx1080ti"]
        row |= {"value": self.value(nominal), "published": self.published}
        for name, (flops, link) in VARIATIONS.items():
            varied = vary and device is not None
            scaled = nominal.scaled(flops=flops, link=link)
            row[name] = self.value(scaled) if varied else None
        return row


# -- SmartPool -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of an iteration, and the bytes that stay beside them."""

    rows: np.ndarray
    period: int
    stays: int

    @property
    def peak(self) -> int:
        """The peak of live bytes."""
        return self.pool("auto").lower_bound_bytes + self.stays

    def pool(self, policy: str) -> Pool:
        """Place them."""
        return _placed(policy, self.period, self.rows.tobytes())

    def ratio(self, policy: str) -> float:
        """Divide what the pool takes by what lives, with what stays in both."""
        return (self.pool(policy).height_bytes + self.stays) / self.peak

    def saved(self, policy: str) -> float:
        """Tell the part of CnMem's footprint that the pool saves."""
        rounds = 3 if self.period else 1  # the allocator is warm then
        rows = np.tile(self.rows, rounds)
        shift = np.repeat(np.arange(rounds) * self.period, len(self.rows))
        rows["born"] += shift
        rows["dead"] += shift
        beside = np.array([(0, int(rows["dead"].max()) + 1, self.stays)], BLOCK)
        rows = np.concatenate([beside, rows])
        cnmem = simulate_allocator(rows, MODELS["cnmem"]).reserved_bytes
        return 1 - (self.pool(policy).height_bytes + self.stays) / cnmem


@lru_cache(maxsize=64)
def _placed(policy: str, period: int, rows: bytes) -> Pool:
    blocks = np.frombuffer(rows, BLOCK)
    return place_blocks(
        blocks, period=period, policy=policy, search=Search(nodes=1 << 20, seconds=30)
    )


def blocks_of(graph: Graph) -> Blocks:
    """List the blocks that a plain iteration asks for."""
    watch = Watch()
    link = lanes_of(CATALOGUE["gtx1080ti"])
    simulate(graph, "keep", graph.plain_peak_bytes, link, watch=watch)
    rows = watch.blocks().astype(BLOCK)
    stays = (rows["born"] == 0) & (rows["dead"] == rows["dead"].max())
    return Blocks(rows[~stays], 0, int(rows["bytes"][stays].sum()))


def author_blocks(path: Path) -> Blocks:
    """Cut one steady iteration out of a trace of the author."""
    history: History = read_history(path)
    found = find_iteration(history.blocks)
    assert found is not None, f"no iteration repeats in {path}"
    rows = np.zeros(len(found.chosen), BLOCK)
    rows["born"], rows["dead"] = found.starts, found.stops
    rows["bytes"] = history.blocks["bytes"][found.chosen]
    return Blocks(rows, found.period, found.staying_bytes)


def smartpool_jobs(models: tuple[str, ...]) -> Iterator[Job]:
    """List what SmartPool is asked for."""
    sources: dict[str, Callable[[], Blocks]] = {}
    for name, file in (("alexnet", "memInfo_alex.text"), ("vgg", "memInfo_vgg.text")):
        path = DATA / "autoswap" / file
        if path.is_file():
            sources[f"{name} (the author's trace)"] = partial(author_blocks, path)
    for name, make in CIFAR.items():
        sources[name] = partial(lambda m: blocks_of(m(100)), make)
    for name in models:
        sources[name] = partial(lambda m: blocks_of(m(at_once=True)), IMAGENET[name])
    for name, source in sources.items():
        known = lru_cache(maxsize=1)(source)
        ratio = AUTHOR_RATIO.get(name.split()[0]) if "trace" in name else None
        ratio = AUTHOR_RATIO["resnet-cifar"] if name == "resnet-cifar" else ratio
        for policy in ("published-best-fit", AUTO):
            value = partial(lambda k, p, _: k().ratio(p), known, policy)
            yield Job("smartpool", name, "", policy, "pool_ratio", "", ratio, value)
        value = partial(lambda k, _: k().saved(AUTO), known)
        most = "up to 0.133"
        yield Job("smartpool", name, "", AUTO, "saved_fraction", "cnmem", most, value)


# -- AutoSwap ------------------------------------------------------------------------


def zero_overhead(
    recording: Callable[[Hardware], Recording],
    costs: Callable[[Hardware], CopyCost],
    policy: str,
    device: Hardware,
) -> float:
    """Tell how far below its peak an iteration gets with nothing stalled."""
    events, cost = recording(device), costs(device)
    peak = events.peak_bytes
    if policy == AUTO:
        return 1 - without_stall(events, 0, costs=cost).peak_bytes / peak
    lowest = min(
        autoswap(
            events, score, peak * part // 100, costs=cost, may_stall=False
        ).peak_bytes
        for score in SCORES
        for part in range(20, 100, 5)
    )
    return 1 - lowest / peak


def autoswap_jobs(models: tuple[str, ...]) -> Iterator[Job]:
    """List what AutoSwap is asked for."""
    path = DATA / "autoswap" / "vec_run_5_vgg.csv"
    if path.is_file():
        milliseconds = ITERATION_MS["vec_run_5_vgg"]
        read = lru_cache(maxsize=1)(
            partial(read_recording, path, iteration_ms=milliseconds)
        )
        for policy in ("autoswap", AUTO):
            value = partial(
                lambda r, p, _: zero_overhead(
                    lambda _: r(), lambda _: CopyCost(), p, CATALOGUE["gtx1080ti"]
                ),
                read,
                policy,
            )
            name = "vgg (the author's trace)"
            measure = "zero_overhead_fraction"
            yield Job("autoswap", name, "", policy, measure, "", AUTHOR_ZERO, value)
    for name in (*CIFAR, *models):
        make = partial(CIFAR[name], 100) if name in CIFAR else IMAGENET[name]
        graph = lru_cache(maxsize=1)(
            make if name in CIFAR else partial(make, at_once=True)
        )
        recording = partial(lambda g, d: recording_of(retime(g(), d)), graph)
        for policy in ("autoswap", AUTO):
            value = partial(zero_overhead, recording, copy_cost, policy)
            yield Job(
                "autoswap",
                name,
                "gtx1080ti",
                policy,
                "zero_overhead_fraction",
                "",
                "up to 0.342",
                value,
            )


# -- DELTA ---------------------------------------------------------------------------


def plain_batch(make: Make, device: Hardware) -> int:
    """Find the largest batch that runs without anything."""
    usable = usable_bytes(device)
    return largest(lambda b: make(b).plain_peak_bytes <= usable, finest=FINEST)


def runs(graph: Graph, policy: str, budget: int, device: Hardware) -> bool:
    """Say whether an iteration fits, and is not much slower."""
    outcome = outcome_of(graph, policy, budget, device, MOST_SLOWDOWN)
    return outcome.fits and outcome.slowdown <= MOST_SLOWDOWN


def outcome_of(
    graph: Graph, policy: str, budget: int, device: Hardware, enough: float = 0.0
) -> Outcome:
    """Run one iteration."""
    lanes = lanes_of(device)
    if policy == AUTO:
        contest = Contest(graph, lanes, hosting=True)
        return contest.at(budget, enough=enough).outcome
    return simulate(graph, policy, budget, lanes, patience=_HOPELESS)


_FOUND: dict[tuple[str, str, str], dict[tuple[float, float], int]] = {}


def max_batch(name: str, policy: str, device: Hardware) -> int:
    """Find the largest batch of a policy; ours may have what lasts on the host.

    What was found for the device a little different is where to begin.
    """
    known = _FOUND.setdefault((name, policy, device.name), {})
    key = device.peak("float32"), device.to_host
    if key not in known:
        make, usable = LARGE[name], usable_bytes(device)

        def fits(batch: int) -> bool:
            return runs(retime(make(batch), device), policy, usable, device)

        if known:
            known[key] = near(fits, next(iter(known.values())), FINEST)
        else:
            known[key] = largest(fits, 2 * plain_batch(make, device), FINEST)
    return known[key]


def batch_ratio(name: str, policy: str, device: Hardware) -> float | None:
    """Divide the largest batch of a policy by the plain one."""
    plain = plain_batch(LARGE[name], device)
    return max_batch(name, policy, device) / plain if plain else None


def saved_fraction(make: Make, policy: str, device: Hardware) -> float:
    """Tell how much of the plain peak can be saved before it is much slower."""
    graph = retime(make(max(plain_batch(make, device), 1)), device)
    peak = graph.plain_peak_bytes
    contest = Contest(graph, lanes_of(device), hosting=True)

    def saves(percent: int) -> bool:
        if percent >= 100:
            return False
        budget = peak * (100 - percent) // 100
        if policy == AUTO:
            outcome = contest.at(budget, enough=MOST_SLOWDOWN).outcome
        else:
            outcome = outcome_of(graph, policy, budget, device)
        return outcome.fits and outcome.slowdown <= MOST_SLOWDOWN

    return near(saves, _SAVED) / 100


def delta_jobs(models: tuple[str, ...]) -> Iterator[Job]:
    """List what DELTA is asked for."""
    for card in ("v100-16g", "gtx1080ti"):
        for name in models:
            make = LARGE[name]
            for policy in ("delta", "dtr", AUTO):
                known: Value = PUBLISHED_BATCH.get(name)
                values: list[tuple[str, Value, Callable[[Hardware], Value]]] = [
                    ("max_batch", None, partial(max_batch, name, policy)),
                    ("max_batch_ratio", known, partial(batch_ratio, name, policy)),
                    (
                        "saved_fraction",
                        PUBLISHED_SAVED,
                        partial(saved_fraction, make, policy),
                    ),
                ]
                for measure, published, value in values:
                    yield Job(
                        "delta", name, card, policy, measure, "1.25", published, value
                    )


# -- DTR -----------------------------------------------------------------------------


def dtr_jobs(models: tuple[str, ...]) -> Iterator[Job]:
    """List the slow-downs by budget."""
    for name in models:
        make, published = DTR[name]
        graph = lru_cache(maxsize=1)(make)
        contests = _Contests(graph)
        for policy in ("dtr", "delta", AUTO):
            for part, known in zip(PARTS, published.split(), strict=True):
                value = partial(contests.slowdown, policy, part)
                yield Job(
                    "dtr",
                    name,
                    "titanv",
                    policy,
                    "slowdown",
                    str(part),
                    known if policy == "dtr" else None,
                    value,
                )


class _Contests:
    """One contest for a network and a device, for all budgets."""

    def __init__(self, graph: Callable[[], Graph]) -> None:
        self.graph = graph
        self.contest = lru_cache(maxsize=5)(self._contest)

    def _contest(self, flops: float, link: float) -> Contest:
        device = CATALOGUE["titanv"].scaled(flops=flops, link=link)
        return Contest(retime(self.graph(), device), lanes_of(device))

    def slowdown(self, policy: str, part: float, device: Hardware) -> Value:
        titan = CATALOGUE["titanv"]
        contest = self.contest(
            device.peak("float32") / titan.peak("float32"),
            device.to_host / titan.to_host,
        )
        budget = int(part * contest.graph.plain_peak_bytes)
        if policy == AUTO:
            return cell(contest.at(budget).outcome)
        return cell(
            simulate(contest.graph, policy, budget, contest.lanes, patience=_HOPELESS)
        )
