"""A graph made alive: operators and versions as objects that the scheduler can judge.

`Buffer` is to the simulator what `recorder.values.Value` is to the run time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lowtide.trace import Graph

_FARTHEST = 512  # operators after which a replay is not followed further


class Clock:
    """Virtual seconds since the iteration began."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0


@dataclass(slots=True, eq=False)
class Operator:
    """One operator; its inputs in order, each once."""

    index: int
    seconds: float
    workspace: int  # bytes beside its outputs while it runs
    inputs: list[Buffer] = field(default_factory=list)
    outputs: list[Buffer] = field(default_factory=list)


class Buffer:
    """One version of a storage: where its bytes are, and who needs them."""

    __slots__ = (
        "alive",
        "arrives",
        "birth",
        "clock",
        "copied",
        "dead",
        "dropped",
        "held",
        "index",
        "lasting",
        "locks",
        "managed",
        "nbytes",
        "next_use",
        "op",
        "passing",
        "pins",
        "plan",
        "resident",
        "reuses",
    )

    def __init__(self, index: int, row: tuple[int, ...], clock: Clock) -> None:
        self.index = index
        self.clock = clock
        nbytes, maker, dead, held, first_use, reuses, lasting = row
        self.nbytes = nbytes
        self.birth = maker
        self.dead = dead
        self.held = held
        self.next_use = first_use
        self.reuses = reuses
        self.lasting = bool(lasting)
        self.op: Operator | None = None  # None: it cannot be computed again
        self.plan = 0
        self.alive = self.resident = maker < 0  # alive: the program may still read it
        self.managed = False  # the scheduler knows of it
        self.dropped = False  # absent, to be computed again
        self.passing = False  # in memory for the length of a replay only
        self.copied: float | None = None  # when its copy out is complete
        self.arrives: float | None = None  # when its copy in is complete
        self.pins = 0  # dropped values that descend from it, directly
        self.locks = 0  # an operator or a replay is about to read it

    @property
    def clean(self) -> bool:
        """Whether a finished copy on a lower tier exists."""
        return self.copied is not None and self.copied <= self.clock.now

    @property
    def writing(self) -> bool:
        """Whether a copy to a lower tier is in flight."""
        return self.copied is not None and self.copied > self.clock.now

    @property
    def at_hand(self) -> bool:
        """Whether a replay can start from it."""
        return self.resident or self.passing or self.copied is not None

    def replay_seconds(self) -> float | None:
        """Seconds to compute it again from what is at hand; None where impossible."""
        if self.op is None:
            return None
        seconds = 0.0
        seen = {self.op}
        stack = [self.op]
        while stack:
            op = stack.pop()
            seconds += op.seconds
            for parent in op.inputs:
                if parent.at_hand:
                    continue
                if parent.op is None or len(seen) >= _FARTHEST:
                    return None
                if parent.op not in seen:
                    seen.add(parent.op)
                    stack.append(parent.op)
        return seconds


def build(
    graph: Graph, clock: Clock, kind: type[Buffer] = Buffer
) -> tuple[list[Operator], list[Buffer]]:
    """Make the objects of a graph, linked to each other."""
    needs = graph.needs.tolist()
    operators = [
        Operator(i, seconds, need)
        for i, (seconds, need) in enumerate(
            zip(graph.operators["seconds"].tolist(), needs, strict=True)
        )
    ]
    names = ["bytes", "operator", "dead", "held", "first_use", "reuses", "lasting"]
    rows = zip(*(graph.versions[name].tolist() for name in names), strict=True)
    buffers = [kind(i, row, clock) for i, row in enumerate(rows)]
    replayable = graph.operators["replayable"].tolist()
    for i, j in zip(*(graph.reads[c].tolist() for c in ACCESS), strict=True):
        if buffers[j] not in operators[i].inputs:
            operators[i].inputs.append(buffers[j])
    for i, j in zip(*(graph.writes[c].tolist() for c in ACCESS), strict=True):
        buffer = buffers[j]
        operators[i].outputs.append(buffer)
        if buffer.reuses < 0:
            operators[i].workspace -= buffer.nbytes
        if replayable[i] and not buffer.lasting:
            buffer.op = operators[i]
    return operators, buffers


ACCESS = ("operator", "version")
