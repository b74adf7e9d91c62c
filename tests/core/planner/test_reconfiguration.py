"""What a change moves is what the plan of the real state moves, byte by byte."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.degrees.degrees import Degrees
from scalai.core.errors import LayoutError, RefusedError, UsageError
from scalai.core.planner.columns import Layout, Workload
from scalai.core.planner.devices import device_named
from scalai.core.planner.reconfiguration import (
    PHASES,
    Hosts,
    Rates,
    Reconfiguration,
    reconfiguration,
    schedule,
    spread,
)
from scalai.core.tensors.collection import Collection
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.plan import BATCH_BYTES, Holder, Plan, plan
from support.model_shapes import gpt
from support.state_by_rank import Ranks, common_bytes, holders, wanters, worlds

H100 = device_named("h100")
SMALL = gpt(4, 24, 4, 50, 16)
SHAPES = {
    "gpt": SMALL,
    "three layers": gpt(3, 24, 6, 30, 16),
    "llama": gpt(2, 32, 8, 40, 16, ffn=40, kv_groups=2, is_gated=True),
    "qwen": replace(gpt(2, 32, 8, 41, 16, ffn=48, kv_groups=4, is_gated=True), has_qkv_bias=True),
    "mixtral": replace(
        gpt(2, 16, 4, 20, 16, ffn=24, kv_groups=2, is_gated=True),
        experts=4, moe_layers=2, top_k=2, expert_ffn=24, shared_ffn=8,
    ),
}  # fmt: skip


def layout(tp: int, pp: int, dp: int, sharding: int = 1, **more: int) -> Layout:
    return Layout(Degrees(tp, pp, dp, **more), 1, sharding=sharding)


@st.composite
def _changes(draw: st.DrawFn) -> tuple[Workload, Layout, Layout, Hosts, Hosts]:
    shape = SHAPES[draw(st.sampled_from(sorted(SHAPES)))]
    ways = worlds(shape, 12)
    ends = []
    for _ in range(2):
        degrees = draw(st.sampled_from(ways))
        sharding = draw(st.sampled_from([0, 1, 1, 2, 3]))
        ends.append(Layout(degrees, 1, sharding=sharding if degrees.pp == 1 else sharding % 2))
    precision = draw(st.sampled_from(["bf16", "fp32"]))
    before, after = ends
    old, new = (
        _hosts(draw, each.degrees.world_size, draw(st.permutations("abcdefghijkl")))
        for each in ends
    )
    return Workload(shape, 48, precision), before, after, old, new


def _hosts(draw: st.DrawFn, ranks: int, names: list[str]) -> Hosts:
    counts: list[int] = []
    while sum(counts) < ranks:
        counts.append(draw(st.integers(1, min(4, ranks - sum(counts)))))
    return tuple(zip(names[: len(counts)], counts, strict=True))


@settings(max_examples=150, deadline=None)
@given(_changes())
def test_bytes_are_those_of_the_real_plan(
    change: tuple[Workload, Layout, Layout, Hosts, Hosts],
) -> None:
    work, before, after, old, new = change
    found = reconfiguration(work, H100, before, after, old, new)
    source, target = _ranks(work, before, after)
    held, wanted = holders(source, old), wanters(target, new)
    real = plan(held, wanted)
    assert (found.moves, found.missing) == (real.bytes_remote, 0)
    into = found.host_bytes.sum(axis=0) - np.diag(found.host_bytes)
    sent = _fetched(real, held)
    named = dict(zip(found.hosts, into.tolist(), strict=True))
    assert {name: size for name, size in named.items() if size} == dict(sent)
    assert found.stays == np.diag(found.host_bytes).sum()
    assert found.needed == sum(_distinct_bytes(wanted, name) for name, _ in new)
    assert found.stays_on_device == _kept(source, target, old, new)


@settings(max_examples=60, deadline=None)
@given(_changes(), st.data())
def test_bytes_of_lost_hosts_are_missed_where_the_real_plan_misses_them(
    change: tuple[Workload, Layout, Layout, Hosts, Hosts], data: st.DataObject
) -> None:
    work, before, after, old, new = change
    lost = frozenset(data.draw(st.sets(st.sampled_from([name for name, _ in old]), min_size=1)))
    found = reconfiguration(work, H100, before, after, old, new, lost=lost)
    source, target = _ranks(work, before, after)
    left = [holder for holder in holders(source, old) if holder.host not in lost]
    try:
        real = plan(left, wanters(target, new))
    except LayoutError:
        assert found.missing > 0
    else:
        assert (found.moves, found.missing) == (real.bytes_remote, 0)
    for name in lost - {name for name, _ in new}:
        assert not found.host_bytes[found.hosts.index(name)].any()


def _ranks(work: Workload, before: Layout, after: Layout) -> tuple[Ranks, Ranks]:
    both = lcm(before.degrees.tp, after.degrees.tp)
    vocab = -(-work.shape.vocab // both) * both
    source = Ranks(work.shape, before, vocab, work.precision)
    return source, Ranks(work.shape, after, vocab, work.precision)


def _fetched(real: Plan, held: Sequence[Holder]) -> Counter[str]:
    """Return the bytes that cross to each host."""
    sizes: Counter[str] = Counter()
    fetches = real.fetches
    for number in range(len(fetches)):
        collection = held[fetches.source[number]].collection
        tensor = collection.tensors[collection.tensor[fetches.source_row[number]]]
        numel = int(fetches.shape[number].prod())
        sizes[real.hosts[fetches.host[number]]] += numel * ITEM_BYTES[tensor.dtype]
    return sizes


def _distinct_bytes(wanted: Sequence[Holder], host: str) -> int:
    ranks = [holder.collection for holder in wanted if holder.host == host]
    rows = {c.box(row) for c in ranks for row in range(len(c))}
    return int(Collection.of(rows).size_bytes().sum())


def _kept(source: Ranks, target: Ranks, old: Hosts, new: Hosts) -> int:
    old_ranks, new_ranks = _by_device(old), _by_device(new)
    return sum(
        common_bytes(source.held(old_ranks[device]), target.wanted(rank))
        for device, rank in new_ranks.items()
        if device in old_ranks
    )


def _by_device(hosts: Hosts) -> dict[tuple[str, int], int]:
    devices = [(name, number) for name, count in hosts for number in range(count)]
    return {device: rank for rank, device in enumerate(devices)}


def change(before: Layout, after: Layout, **more: Any) -> Reconfiguration:
    return reconfiguration(Workload(SMALL, 48), H100, before, after, **more)


def test_a_layout_that_stays_moves_nothing() -> None:
    same = change(layout(2, 2, 2), layout(2, 2, 2))
    assert (same.moves, same.missing, len(same.hosts)) == (0, 0, 1)
    assert same.stays == same.needed > 0


def test_one_host_crosses_nothing_with_seven_of_its_eight_devices() -> None:
    found = change(layout(2, 2, 2), layout(1, 1, 7))
    assert found.moves == 0 and found.hosts == ("host-0",) and found.host_bytes.shape == (1, 1)
    assert found.seconds["move"] == 0 and found.seconds["restore"] > 0


def test_what_a_host_that_joins_needs_comes_from_those_there() -> None:
    found = change(layout(2, 2, 2, sharding=0), layout(2, 2, 4, sharding=0))
    assert found.hosts == ("host-0", "host-1")
    assert found.host_bytes[0, 1] == found.moves and not found.host_bytes[1].any()


def test_replicas_give_equal_parts() -> None:
    old, new = (("a", 2), ("b", 2), ("c", 2)), (("d", 2),)
    found = change(layout(2, 1, 3, sharding=0), layout(2, 1, 1), before_hosts=old, after_hosts=new)
    column = found.host_bytes[:3, 3]
    assert column.sum() == found.moves and column.max() - column.min() <= 100


def test_nothing_before_is_a_start() -> None:
    found = reconfiguration(Workload(SMALL, 48), H100, None, layout(2, 2, 2), relaunch_s=7.0)
    assert found.total_s == 7.0 and found.needed == 0


def test_seconds_are_of_the_busiest_and_of_what_was_measured() -> None:
    rates = Rates(host_copy=1e3, data_plane=1e2)
    found = change(
        layout(1, 1, 8, sharding=0), layout(1, 1, 16, sharding=0), relaunch_s=3.0, step_s=2.0,
        rates=rates,
    )  # fmt: skip
    assert tuple(found.seconds) == PHASES
    assert found.seconds["relaunch"] == 3.0 and found.seconds["quiesce"] == 2.0
    assert found.seconds["move"] == found.moves / 1e2
    assert found.seconds["restore"] == found.needed / 2 / 1e3
    assert found.total_s == sum(found.seconds.values()), "it is one batch"


def test_all_but_the_last_batch_is_restored_beside_the_move() -> None:
    large = Workload(gpt(8, 1024, 16, 5000, 64), 48)
    found = reconfiguration(large, H100, layout(1, 1, 8), layout(1, 1, 16))
    shorter = min(found.seconds["move"], found.seconds["restore"])
    assert found.moves > 16 * BATCH_BYTES and found.beside_s == pytest.approx(15 / 16 * shorter)
    assert found.total_s == sum(found.seconds.values()) - found.beside_s


def test_a_schedule_says_what_runs_beside_what_and_how_long_it_took_last() -> None:
    found = change(layout(1, 1, 8, sharding=0), layout(1, 1, 16, sharding=0), relaunch_s=3.0)
    ahead, still, moved, first = schedule(found, is_ahead=True)
    assert ahead.startswith("beside the training: ")
    assert still.startswith("standing still: snapshot ") and still.endswith("relaunch 3 s")
    assert "cross in at most 16 batches a host" in moved and "move" in moved and "restore" in moved
    assert "the first update waits" in first
    last = {"build": 4.0, "drain": 0.1, "relaunch": 0.25, "restore": 0.5, "first_step": 0.7}
    still, moved, first = schedule(None, last, is_ahead=False)
    assert still.startswith("standing still: drain 0.1 s, relaunch 0.25 s with the next workers'")
    assert moved.endswith("restored beside the next: restore 0.5 s")
    assert first.endswith(": first_step 0.7 s")
    nothing = change(layout(2, 2, 2), layout(1, 1, 7))
    assert "nothing crosses" in schedule(nothing, is_ahead=True)[2]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (layout(3, 1, 1), "tp=3 of TP3·PP1·DP1 does not divide heads=4; use 1, 2, 4"),
        (layout(1, 5, 1), "use 4 or fewer"),
        (layout(1, 1, 2, ep=2), "ep=2"),
    ],
)
def test_a_layout_that_does_not_cut_the_model_is_refused(wrong: Layout, why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        change(layout(1, 1, 1), wrong)
    with pytest.raises(RefusedError, match=why):
        change(wrong, layout(1, 1, 1))


def test_experts_that_are_cut_otherwise_than_the_rest_are_refused() -> None:
    work = Workload(SHAPES["mixtral"], 48, expert_tp=1)
    assert reconfiguration(work, H100, layout(1, 1, 2), layout(1, 2, 2)).needed > 0
    with pytest.raises(RefusedError, match="a tensor parallelism of 1, not tp=2"):
        reconfiguration(work, H100, layout(1, 1, 2), layout(2, 1, 1))


def test_hosts_without_the_layouts_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="has 2 ranks, the 3 hosts have 3; give as many"):
        change(layout(1, 1, 1), layout(1, 1, 2), after_hosts=(("a", 1), ("b", 1), ("c", 1)))
    with pytest.raises(UsageError, match="twice"):
        change(layout(1, 1, 1), layout(1, 1, 2), after_hosts=(("a", 1), ("a", 1)))
    with pytest.raises(UsageError, match="both must be 1 or more"):
        spread(0, 8)


def test_new_hosts_have_names_of_their_own() -> None:
    assert spread(5, 2, ("host-1", "b")) == (("host-1", 2), ("b", 2), ("host-0", 1))
