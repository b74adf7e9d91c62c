"""The newest state that is whole is found, whatever is lost, and what is passed over says why."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.job.recovery import (
    LINEAGE,
    MOST_RUNS,
    Descent,
    KnownState,
    Origin,
    contains,
    lineage_from,
    newest_whole,
)
from scalai.core.tensors.collection import Collection, Tensor, concatenate
from scalai.core.tensors.coverage import Cover
from scalai.core.tensors.region import Box
from scalai.core.tensors.replicas import ring_of, to_keep

HOSTS = "abcde"
ROWS = 6
TENSORS = (Tensor("main/w", (ROWS,), "F32"), Tensor("param/v", (ROWS,), "F32"))

SHARDING = st.lists(st.sampled_from(HOSTS), min_size=2 * ROWS, max_size=2 * ROWS)
"""By element the host that writes it: any sharding of an optimizer, of stages, of experts."""


@st.composite
def written(draw: st.DrawFn) -> dict[str, Collection]:
    """Return what each host holds of a state of which every element is written, some twice."""
    rows: dict[str, list[tuple[Tensor, Box]]] = {host: [] for host in HOSTS}
    for _ in range(draw(st.integers(1, 2))):
        for number, host in enumerate(draw(SHARDING)):
            tensor, row = TENSORS[number // ROWS], number % ROWS
            rows[host].append((tensor, Box((row,), (1,))))
    return {host: Collection.of(sorted(set(r), key=str)) for host, r in rows.items() if r}


def with_replicas(held: dict[str, Collection], replicas: int) -> dict[str, Collection]:
    ring = ring_of(dict.fromkeys(held, ""), replicas)
    return {h: concatenate([held[h], to_keep(ring, h, held)]) for h in held}


def is_whole(held: dict[str, Collection]) -> bool:
    """Whether every element is held, counted one by one."""
    found = {tensor.name: np.zeros(tensor.shape, dtype=bool) for tensor in TENSORS}
    for pieces in held.values():
        for row in range(len(pieces)):
            tensor, box = pieces.box(row)
            found[tensor.name][box.offset[0] : box.offset[0] + box.shape[0]] = True
    return all(mask.all() for mask in found.values())


def state_of(
    held: dict[str, Collection], origin: Origin, step: int, number: int | None
) -> KnownState:
    """Return what is known of a state that these hosts hold."""
    cover = Cover()
    for host, pieces in held.items():
        cover.put(host, pieces, len(TENSORS))
    lacks = "" if cover.is_whole() else "parts are missing"
    return KnownState(origin, step, number, tuple(sorted(held)), lacks=lacks)


def left(held: dict[str, Collection], lost: set[str]) -> dict[str, Collection]:
    return {host: pieces for host, pieces in held.items() if host not in lost}


@pytest.mark.fault
@settings(deadline=None, max_examples=300)
@given(st.data())
def test_the_newest_whole_state_is_found_after_any_losses(data: st.DataObject) -> None:
    """Snapshots every few steps, of which some have replicas; survivors at two steps; a disk."""
    lost = data.draw(st.sets(st.sampled_from(HOSTS)))
    step, states = 0, list[KnownState]()
    known: list[tuple[int, int | None, dict[str, Collection]]] = []
    for number in range(1, data.draw(st.integers(1, 4))):
        step += data.draw(st.integers(1, 10))
        held = data.draw(written())
        replicas = data.draw(st.integers(0, 3))
        held = left(with_replicas(held, replicas), lost)
        known.append((step, number, held))
        states.append(state_of(held, Origin.SNAPSHOT, step, number))
    for behind in data.draw(st.sets(st.integers(0, 2))):
        held = left(data.draw(written()), lost | data.draw(st.sets(st.sampled_from(HOSTS))))
        known.append((step + 5 - behind, None, held))
        states.append(state_of(held, Origin.SURVIVORS, step + 5 - behind, None))
    answer = newest_whole(data.draw(st.permutations(states)))
    furthest = max((step for step, _, held in known if is_whole(held)), default=None)
    found = None if answer.state is None else answer.state.step
    assert found == furthest, (answer, known)
    assert len(answer.others) == len(states) - (answer.state is not None)
    assert all(why for _, why in answer.others)
    if answer.state is not None:
        further = [(s, why) for s, why in answer.others if s.step > answer.state.step]  # type: ignore[operator]
        assert all(why == "parts are missing" for _, why in further)


@settings(deadline=None, max_examples=200)
@given(written(), st.integers(1, 3), st.data())
def test_with_replicas_so_many_hosts_may_be_lost(
    held: dict[str, Collection], replicas: int, data: st.DataObject
) -> None:
    most = min(replicas, len(held) - 1)
    lost = data.draw(st.sets(st.sampled_from(sorted(held)), max_size=most))
    kept = left(with_replicas(held, replicas), lost)
    older = state_of(held, Origin.SNAPSHOT, 3, 1)
    answer = newest_whole([older, state_of(kept, Origin.SNAPSHOT, 9, 2)])
    assert answer.state is not None and answer.state.step == 9


def test_what_is_in_doubt_is_passed_over_and_named() -> None:
    torn = KnownState(Origin.SEALED, 12, hosts=("a", "b"), doubt="replicas of 'main/w' differ")
    rescued = KnownState(Origin.SURVIVORS, 14, lacks="1 of 2 tensors are held by ['a'].")
    kept = KnownState(Origin.SNAPSHOT, 10, 4, ("a", "b"), ("c",))
    answer = newest_whole([kept, torn, rescued])
    assert answer.state is kept
    assert str(answer) == (
        "step=10 from='a snapshot' hosts=a,b without=c passed_over=\"workers that outlived a "
        "failure of step 14: 1 of 2 tensors are held by ['a'].; a snapshot that was not committed "
        "of step 12: replicas of 'main/w' differ\""
    )
    assert answer.to_json()["others"][0]["why"] == "1 of 2 tensors are held by ['a']."


def test_numbers_tell_the_order_where_a_job_went_back() -> None:
    """Generation 5 of step 20 was made after the job went back from generation 4 of step 30."""
    states = [KnownState(Origin.STOP, 30, 4, ("a",)), KnownState(Origin.STOP, 20, 5, ("a",))]
    answer = newest_whole(states)
    assert answer.state is states[1]
    assert answer.others == ((states[0], "the job had gone back behind it"),)


def test_what_only_a_disk_knows_counts_last() -> None:
    disk = KnownState(Origin.DISK, 90, 9, ("a",), is_left_behind=True)
    kept = KnownState(Origin.STORE, 10, 2, ("a",))
    answer = newest_whole([disk, kept])
    assert answer.state is kept
    assert answer.others == ((disk, "the job has gone on without it"),)
    assert newest_whole([disk]).state is disk


def test_nothing_is_nothing() -> None:
    assert newest_whole([]).state is None and str(newest_whole([])) == "from=nothing"


def test_what_was_not_committed_counts_where_it_is_further() -> None:
    kept = KnownState(Origin.SNAPSHOT, 10, 4, ("a",))
    assert newest_whole([kept, KnownState(Origin.SEALED, 10)]).state is kept
    further = KnownState(Origin.SURVIVORS, 11, hosts=("a",))
    assert newest_whole([kept, further, KnownState(Origin.SEALED, None)]).state is further


# ---------------------------------------------------------------------- lineage


def made(run: str, number: int, source: tuple[Descent, dict[str, Any]] | None = None) -> (
    tuple[Descent, dict[str, Any]]
):  # fmt: skip
    """Return a generation that a run has made from another one, with its ``about``."""
    lineage = [] if source is None else lineage_from(source[1], source[0].number, run)
    about = {"snapshot": f"{run}-1-{10 * number}", LINEAGE: lineage}
    return Descent.of(number, about), about


@pytest.mark.fault
def test_a_state_contains_what_it_comes_from_and_nothing_that_was_made_apart() -> None:
    first = made("r", 3)
    later, last = made("r", 5, first), made("r", 9, made("r", 5, first))
    second = made("s", 6, later)
    third = made("t", 7, second)
    assert contains(third[0], first[0]) and contains(third[0], later[0])
    assert contains(third[0], second[0]) and not contains(second[0], third[0])
    for one, other in ((third, last), (last, third), (second, last), (last, second)):
        assert not contains(one[0], other[0]), "r went on from 5 to 9 without them"


def test_where_a_lineage_is_not_known_the_number_counts() -> None:
    old = Descent.of(4, {"snapshot": "x-1-40"})
    new = made("s", 6)[0]
    assert contains(new, old) and not contains(old, new)
    assert contains(Descent.of(5, {}), Descent.of(4, {}))


def test_a_lineage_has_an_end() -> None:
    state = made("r0", 1)
    for number in range(2, 3 * MOST_RUNS):
        state = made(f"r{number}", number, state)
    assert len(state[1][LINEAGE]) == MOST_RUNS
    assert contains(state[0], made("r0", 1)[0]), "what fell out of it is older"
    apart = made("x", 3 * MOST_RUNS - 3)[0]
    assert not contains(state[0], apart), "made beside runs that it names"
