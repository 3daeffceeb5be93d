# SPDX-License-Identifier: Apache-2.0
"""The networks of the published experiments have the sizes and the work they have."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks import paper
from benchmarks.paper_jobs import Job, blocks_of, zero_overhead
from benchmarks.paper_subjects import DTR, IMAGENET, LARGE
from lowtide.elsewhere.accesses import copy_cost, recording_of
from lowtide.elsewhere.retime import retime
from lowtide.hardware import CATALOGUE
from lowtide.planner.candidates import FREE, MALLOC
from lowtide.simulator.attention import make_bert, make_gpt2, make_swin
from lowtide.simulator.networks import make_unet
from lowtide.simulator.vision import (
    make_alexnet,
    make_cifar_resnet,
    make_densenet,
    make_imagenet_resnet,
    make_inception,
    make_vgg,
)
from lowtide.trace import Graph

CARD = CATALOGUE["gtx1080ti"]


def parameters(graph: Graph) -> float:
    """Count what gets a gradient that outlives the iteration, in millions."""
    versions, n = graph.versions, len(graph.operators)
    gradients = (versions["operator"] >= 0) & (versions["dead"] == n + 1)
    return float(versions["bytes"][gradients].sum()) / 4e6


@pytest.mark.parametrize(
    ("make", "millions", "gigaflops"),
    [  # parameters; multiplications with additions of one picture, counted as two
        (lambda: make_alexnet(batch=1), 61.1, 1.43),
        (lambda: make_vgg(11, batch=1), 132.9, 15.2),
        (lambda: make_vgg(16, batch=1), 138.4, 30.9),
        (lambda: make_vgg(19, batch=1), 143.7, 39.3),
        (lambda: make_imagenet_resnet(18, batch=1), 11.7, 3.6),
        (lambda: make_imagenet_resnet(34, batch=1), 21.8, 7.3),
        (lambda: make_imagenet_resnet(50, batch=1), 25.6, 8.2),
        (lambda: make_imagenet_resnet(101, batch=1), 44.5, 15.6),
        (lambda: make_imagenet_resnet(152, batch=1), 60.2, 23.0),
        (lambda: make_densenet(batch=1), 8.0, 5.7),
        (lambda: make_inception(batch=1), 42.7, 24.6),
        (lambda: make_cifar_resnet(batch=1), 0.27, 0.082),
        (lambda: make_gpt2(length=64), 774.0 + 64.3, None),  # the vocabulary twice
        (lambda: make_gpt2(48, 1600, 25, length=64), 1557.6 + 80.4, None),
        (lambda: make_bert(batch=1, length=64), 333.6, None),
        (lambda: make_swin(batch=1), 28.3, 9.0),
    ],
)
def test_sizes(
    make: Callable[[], Graph], millions: float, gigaflops: float | None
) -> None:
    graph = make()
    assert parameters(graph) == pytest.approx(millions, rel=0.03)
    if gigaflops is not None:  # once forward, twice back
        total = graph.operators["flops"].sum() / 3e9
        assert total == pytest.approx(gigaflops, rel=0.1)


def test_updates_at_once_give_gradients_back() -> None:
    graph = make_imagenet_resnet(18, batch=1, at_once=True)
    assert parameters(graph) == 0.0
    later = make_imagenet_resnet(18, batch=1)
    names = [graph.names[i] for i in graph.operators["name"].tolist()]
    assert (
        names.count("update_")
        == 2 * 20 + 1
        == sum(later.names[i] == "update_" for i in later.operators["name"].tolist())
    )


@pytest.mark.parametrize("make", [make_cifar_resnet, lambda: make_unet(2, batch=1)])
def test_events_are_those_of_the_iteration(make: Callable[[], Graph]) -> None:
    graph = retime(make(), CARD)
    recording = recording_of(graph)
    events = recording.events
    assert len(events) == 3 * recording.period
    assert (np.diff(events["seconds"]) >= 0).all()
    assert recording.seconds == pytest.approx(graph.seconds)
    kinds = events["kind"][: recording.period]
    sizes = events["bytes"][: recording.period]
    assert sizes[kinds == MALLOC].sum() == sizes[kinds == FREE].sum()
    # an operator's outputs are there before its dying inputs go, in both
    assert recording.peak_bytes == pytest.approx(graph.plain_peak_bytes, rel=0.02)


def test_a_pool_of_an_iteration_holds_all_that_lives() -> None:
    graph = make_cifar_resnet()
    blocks = blocks_of(graph)
    assert blocks.peak == graph.plain_peak_bytes
    assert 1.0 <= blocks.ratio("auto") <= blocks.ratio("published-best-fit")
    assert blocks.saved("auto") > 0


def test_ours_swaps_more_than_the_published_scores() -> None:
    graph = make_vgg(11, batch=8, at_once=True)

    def recording(device: object) -> object:
        return recording_of(retime(graph, CARD))

    ours, theirs = (
        zero_overhead(recording, copy_cost, policy, CARD)  # type: ignore[arg-type]
        for policy in ("auto", "autoswap")
    )
    assert ours >= theirs >= 0.0


def job(policy: str, value: object, **more: object) -> Job:
    fields = {"table": "dtr", "model": "unet", "hardware": "titanv", "at": "0.5"}
    fields |= {"measure": "slowdown", "published": None, **more}
    return Job(policy=policy, value=lambda _: value, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ours", "theirs", "beaten"),
    [("1.10", "1.10", False), ("1.11", "1.10", True), ("T", "O", False),
     ("O", "T", True), ("1.02", "T", False)],
)  # fmt: skip
def test_verdicts(ours: str, theirs: str, beaten: bool) -> None:
    rows = [job(p, v).row(vary=False) for p, v in (("dtr", theirs), ("auto", ours))]
    last = [*paper.verdicts(rows)][-1]
    assert last.startswith("auto slower than delta or dtr:")
    assert last.endswith("nowhere") is not beaten


def test_a_row_has_its_variations() -> None:
    def rate(device: object) -> float:
        return device.peak("float32") / 1e12 + device.to_host / 1e9  # type: ignore[attr-defined]

    row = Job("dtr", "unet", "v100-16g", "auto", "slowdown", "", None, rate).row(
        vary=True
    )
    assert row["value"] == pytest.approx(15.7 + 12)
    assert row["flops_down"] == pytest.approx(0.8 * 15.7 + 12)
    assert row["link_up"] == pytest.approx(15.7 + 1.2 * 12)


def test_every_subject_can_be_made() -> None:
    for make in LARGE.values():
        assert make(1).plain_peak_bytes > 0
    for make, published in DTR.values():
        assert make().plain_peak_bytes > 0
        assert len(published.split()) == 7
    for make in IMAGENET.values():
        assert math.isfinite(retime(make(batch=1), CARD).seconds)
