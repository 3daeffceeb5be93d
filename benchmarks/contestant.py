"""One training in its own process, driven step by step: a worker of budget.py.

It trains plainly, with `torch.utils.checkpoint` around each block, or within a budget,
on torch's own CPU allocator or on lowtide's. It tells the loss of each step, its time,
and (on lowtide's allocator) its peak of live bytes.
"""

import sys
import time
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import dynamic, harness
from tests.compare import seed_everything, training_state


class Contestant:
    """A training that waits for its turn."""

    def __init__(
        self,
        model: str,
        *,
        allocator: str = "lowtide",
        checkpoint: bool = False,
        quick: bool = False,
        seed: int = 0,
        flags: dict[str, float] | None = None,
    ) -> None:
        self.counter: Any = None
        if allocator == "lowtide":
            from lowtide.runtime.allocator import install

            self.counter = install()
        seed_everything(seed)
        self.training = dynamic.build(
            model, seed=seed, checkpoint=checkpoint, quick=quick, **(flags or {})
        )
        self.budget: Any = None
        self.stack = ExitStack()

    def enter(self, **options: Any) -> None:
        """Put a budget in force; it stays until the contestant leaves."""
        from lowtide.runtime.session import Session

        self.budget = self.stack.enter_context(Session(**options))

    def step(self, count: int = 1) -> dict[str, list[Any]]:
        """Run steps; a session resets the counter itself, so it reports the peaks."""
        seconds, losses, peaks = [], [], []
        for _ in range(count):
            if self.counter is not None and self.budget is None:
                self.counter.reset_peak()
            started = time.perf_counter()
            loss = self.training.step()
            seconds.append(time.perf_counter() - started)
            losses.append(loss.hex())
            if self.counter is not None:
                peaks.append(self.counter.peak.value)
        return {"seconds": seconds, "losses": losses, "peaks": peaks}

    def report(self) -> dict[str, Any]:
        """Return the report of the budget so far."""
        return asdict(self.budget.report())

    def leave(self) -> dict[str, Any]:
        """Leave the budget; raises what the session has to say at its end."""
        self.stack.close()
        return self.report()

    def state(self) -> dict[str, str]:
        """Digest weights, buffers, optimizer and random states."""
        return training_state(self.training.model, self.training.optimizer)


def profiled_peak(steps: int, **request: Any) -> dict[str, int]:
    """Train under torch's profiler and compare its peak of live bytes with ours."""
    from torch.profiler import ProfilerActivity, profile

    from lowtide.runtime.allocator import install

    budget = request.pop("budget", None)
    counter = install()
    counter.reset_peak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        contestant = Contestant(**request)
        if budget is not None:
            contestant.enter(**budget)
        contestant.step(steps)
        ours = counter.peak.value
        if budget is not None:
            report = contestant.leave()
            ours = max(report["first_peak_bytes"], report["peak_bytes"])
    # The whole run, since the profiler does not see blocks from before it go.
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    return {"counted_bytes": ours, "profiled_bytes": _peak(events)}


def _peak(events: Iterable[Any]) -> int:
    live = peak = 0
    memory = (event for event in events if event.name() == "[memory]")
    for event in sorted(memory, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def main() -> None:
    """Serve one contestant."""
    warnings.simplefilter("ignore")
    # On several threads `index_put_` adds floats in any order (swin's tables of
    # positions), so that not even plain PyTorch equals itself to the last bit.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    contestants: list[Contestant] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        verb = request.pop("do")
        if verb == "profile":
            return dict(profiled_peak(**request))
        if verb == "build":
            contestants.append(Contestant(**request))
            return {}
        return getattr(contestants[-1], verb)(**request) or {}

    harness.serve(answer)


if __name__ == "__main__":
    main()
