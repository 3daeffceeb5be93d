# SPDX-License-Identifier: Apache-2.0
"""Events in every order leave every value in the scheduler where it belongs."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from lowtide.scheduler.director import KEEP, RECOMPUTE, RULES, SWAP
from lowtide.scheduler.scheduler import Scheduler
from tests.pure.candidates import OPEN, Item, entries, scheduler_of


@dataclass(eq=False)
class Model(Item):
    """A value and where it really is."""

    state: str = "new"  # present, swapped, dropped or gone
    copy: str = "none"  # flying, or done
    told: bool = False  # the scheduler knows that the copy is done
    entered: bool = True  # the plan still waits to be carried out

    def expected(self) -> set[str]:
        if self.state == "swapped":
            return {"absent"}
        if self.state != "present":
            return set()
        where = {"present"}
        if self.copy == "done" and self.told:
            where.add("copied_out")
        if self.entered and self.plan == SWAP and self.copy == "none":
            where.add("to_write")
        if self.entered and self.plan == RECOMPUTE:
            where.add("to_drop")
        return where


class Events(RuleBasedStateMachine):
    """Whatever happens to values, as the runtime would tell it."""

    items = Bundle("items")

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: Scheduler[Model] = Scheduler(
            RULES["auto"], OPEN, force=False, seed=0
        )
        self.all: list[Model] = []
        self.leaving: list[Model] = []  # swapped out now, in order of leaving

    @rule(target=items, plan=st.sampled_from([None, KEEP, SWAP, RECOMPUTE]))
    def save(self, plan: int | None) -> Model:
        item = Model(str(len(self.all)), birth=len(self.all), seconds=1e-4)
        item.state = "present"
        self.scheduler.saved(item, plan)
        assert plan is None or item.plan == plan
        self.all.append(item)
        return item

    @rule(item=items)
    def start_write(self, item: Model) -> None:
        if item.state == "present" and item.copy == "none":
            item.copy, item.writing = "flying", True
            self.scheduler.write_started(item)

    @rule(item=items)
    def finish_write(self, item: Model) -> None:
        if item.copy == "flying" and item.state == "present":
            item.copy, item.writing, item.clean = "done", False, True
            item.told = True
            self.scheduler.copied(item)

    @rule(item=items, swapped=st.booleans())
    def leave(self, item: Model, swapped: bool) -> None:
        if item.state != "present" or swapped != (item.copy == "done"):
            return
        if item.copy == "flying":
            return
        item.state = "swapped" if swapped else "dropped"
        item.entered = False
        if swapped:
            self.leaving.append(item)
        self.scheduler.left(item, swapped=swapped)

    @rule(item=items)
    def come_back(self, item: Model) -> None:
        if item.state in ("swapped", "dropped"):
            item.state = "present"
            self._not_leaving(item)
            self.scheduler.returned(item)

    @rule(item=items)
    def go(self, item: Model) -> None:
        item.state = "gone"
        self._not_leaving(item)
        self.scheduler.gone(item)

    def _not_leaving(self, item: Model) -> None:
        if item in self.leaving:
            self.leaving.remove(item)

    @invariant()
    def every_value_is_where_it_belongs(self) -> None:
        for item in self.all:
            assert entries(self.scheduler, item) == item.expected(), item

    @invariant()
    def absent_values_keep_the_order_of_leaving(self) -> None:
        assert list(self.scheduler.absent.values()) == self.leaving

    @invariant()
    def actions_concern_only_what_is_in_memory(self) -> None:
        acted = [item for _, item in self.scheduler.victims()]
        acted += [item for _, item in self.scheduler.forced()]
        acted += self.scheduler.early_writes()
        assert all(item.state == "present" for item in acted)
        assert set(self.scheduler.returns(0)) == set(self.leaving)


TestEvents = Events.TestCase
TestEvents.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
)


def test_a_copy_that_lands_after_its_value_may_not_be_touched_is_no_victim() -> None:
    scheduler = scheduler_of()
    item = Item()
    scheduler.saved(item, SWAP)
    scheduler.write_started(item)
    scheduler.gone(item)  # modified in place while it was being written
    item.clean = True
    scheduler.copied(item)
    assert entries(scheduler, item) == set()
    assert list(scheduler.victims()) == []


def test_a_copy_reported_after_its_value_was_released_is_no_victim() -> None:
    scheduler = scheduler_of()
    item = Item(clean=True)
    scheduler.saved(item, SWAP)
    scheduler.write_started(item)
    scheduler.left(item, swapped=True)  # the copy was done, but not yet reported
    scheduler.copied(item)
    assert entries(scheduler, item) == {"absent"}
    assert list(scheduler.victims()) == []
