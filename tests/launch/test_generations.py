"""What hosts hold of the generations, and the proof: it compares with what was committed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scalai.core.errors import ProofError, UsageError
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.fingerprint import CommitStatement, piece_fingerprint, tensor_fingerprints
from scalai.core.tensors.region import Box
from scalai.launch.coordinator.calls import BroughtPart, HostLists, read_part
from scalai.launch.coordinator.held_states import (
    HeldParts,
    HeldStates,
    committed_fingerprints,
    facts_of,
)
from scalai.store.files import slices
from scalai.store.manifest import HostManifest, StoredFile, manifest_bytes
from scalai.store.parts import summary
from support import committed_parts

MATRIX = Tensor("exp_avg/w", (64, 8), "F32")
VALUES = np.random.default_rng(3).integers(0, 1 << 31, MATRIX.shape, dtype=np.uint32)
WRITTEN = Box((0, 0), (64, 8))


def fingerprint(box: Box) -> int:
    return piece_fingerprint(np.array(VALUES[slices(box)]), box, MATRIX.shape)


def part(host: str, files: dict[str, list[Box]], snapshot: str = "r-1-9") -> HostManifest:
    """Return a host's part: boxes of the matrix by file."""
    boxes = [(number, box) for number, found in enumerate(files.values()) for box in found]
    return HostManifest(
        generation=-1, step=9, host=host,
        about={"snapshot": snapshot, "tensors": 1, "consumed_samples": 1}, ranks=(),
        collection=Collection.of([(MATRIX, box) for _, box in boxes]),
        file=np.array([number for number, _ in boxes], dtype=np.int64),
        begin=np.zeros(len(boxes), dtype=np.int64),
        fingerprint=np.array([fingerprint(box) for _, box in boxes], dtype=np.uint64),
        files=tuple(StoredFile(name, 1 << 20) for name in files), scalars={}, rank_state={},
    )  # fmt: skip


def committed() -> tuple[HeldStates, HostManifest]:
    """Return what one host has written and the coordinator has committed as generation 4."""
    generations = HeldStates()
    generations.add_sealed(part("a", {"rank-0.safetensors": [WRITTEN]}))
    generations.commit(4, "r-1-9")
    return generations, generations.parts(4)["a"]


def test_parts_of_two_steps_are_no_state_until_one_is_written_again() -> None:
    halves = [Box((0, 0), (32, 8)), Box((32, 0), (32, 8))]
    one, two = (part(host, {"x": [half]}) for host, half in zip("ab", halves, strict=True))
    held = HeldParts()
    held["a"], held["b"] = one, replace(two, step=8)
    assert not held.is_whole()
    held["b"] = two
    assert held.is_whole() and held.holders() == {"a", "b"}
    held["c"] = replace(part("c", {"x": [WRITTEN]}), step=8)
    assert not held.is_whole() and held.holders() == {"a", "b", "c"}
    del held["c"]
    assert held.is_whole() and held.holders() == {"a", "b"}
    del held["b"]
    assert not held.is_whole() and held.holders() == {"a"}


def test_a_snapshot_awaits_all_hosts_that_any_of_its_parts_names() -> None:
    """Also where they name others, in lists of their own or in one that they share."""
    generations, both = HeldStates(), ["a", "b"]
    for host, named in (("a", both), ("b", both), ("c", ["c", "d"]), ("e", both)):
        sealed = part(host, {"x": [WRITTEN]})
        generations.add_sealed(replace(sealed, about={**sealed.about, "hosts": named}))
    (unfinished,) = generations.catalogue.unfinished((), generations.survey())
    assert unfinished.missing == ("a", "b", "c", "d", "e")
    assert unfinished.present == ("a", "b", "c", "e")


FETCHED = [Box((39, 4), (1, 4)), Box((40, 0), (24, 8))]
"""What a second host fetches where the boundary of two ranks falls inside a row."""


@pytest.mark.fault
def test_fetched_pieces_that_overlap_written_ones_do_not_change_the_proof() -> None:
    _, own = committed()
    fetched = replace(
        part("b", {"fetched-0.safetensors": FETCHED}), generation=4, committed=own.committed
    )
    after = HeldStates()  # both agents and the coordinator have died
    assert after.add(fetched) and after.add(own)
    assert [generation.number for generation in after.covered()] == [4]
    after.go_back_to(4)
    rows = Collection.of([(MATRIX, Box((0, 0), (39, 8))), (MATRIX, Box((39, 0), (1, 4))),
                          *((MATRIX, box) for box in FETCHED)])  # fmt: skip
    values = np.array([fingerprint(rows.box(row)[1]) for row in range(4)], dtype=np.uint64)
    after.prove(4, tensor_fingerprints(rows, values))
    with pytest.raises(ProofError, match="1 differ: exp_avg/w"):
        after.prove(4, tensor_fingerprints(rows, values + np.uint64(1)))


def test_manifests_that_state_nothing_are_added_up_without_what_was_fetched() -> None:
    old = [
        replace(part("a", {"rank-0.safetensors": [WRITTEN]}), generation=4),
        replace(part("b", {"fetched-0.safetensors": FETCHED}), generation=4),
    ]
    assert committed_fingerprints(old) == {MATRIX.name: fingerprint(WRITTEN)}
    # Or a cover without overlaps, where what was written is not all there.
    apart = [
        part("a", {"rank-0.safetensors": [Box((0, 0), (40, 8))]}),
        part("b", {"fetched-0.safetensors": FETCHED}),
    ]
    assert committed_fingerprints(apart) == {MATRIX.name: fingerprint(WRITTEN)}


def test_a_state_whose_pieces_do_not_tell_its_fingerprint_is_not_taken_for_whole() -> None:
    overlapping = [Box((0, 0), (40, 8)), Box((30, 0), (34, 8))]
    generations = HeldStates()
    generations.add(replace(part("a", {"fetched-0.safetensors": overlapping}), generation=4))
    assert generations.covered() == ()


def test_parts_that_were_committed_with_other_fingerprints_are_named() -> None:
    _, own = committed()
    other = replace(own, host="z", committed=CommitStatement(("z",), {MATRIX.name: 5}))
    with pytest.raises(ProofError, match=r"hosts 'a' and 'z'.*generation 4.*exp_avg/w"):
        committed_fingerprints([own, other])


def test_what_is_committed_is_stated_with_its_hosts() -> None:
    generations, own = committed()
    assert own.committed == generations.stated(4)
    assert own.committed == CommitStatement(("a",), {MATRIX.name: fingerprint(WRITTEN)})


@pytest.mark.fault
def test_what_was_sealed_before_the_newest_generation_is_no_newer_state() -> None:
    """A host that was away brings it: under a new number it would be taken for the newest."""
    generations = HeldStates()
    generations.add_sealed(part("a", {"rank-0.safetensors": [WRITTEN]}))
    assert generations.whole_snapshot() == "r-1-9"
    later = part("b", {"rank-0.safetensors": [WRITTEN]}, snapshot="r-2-12")
    generations.add(replace(later, generation=6, step=12))
    assert generations.whole_snapshot() is None
    generations.add_sealed(replace(later, about={**later.about, "snapshot": "r-2-15"}, step=15))
    assert generations.whole_snapshot() == "r-2-15"


@pytest.mark.fault
def test_another_state_of_a_number_whose_holder_has_gone_is_proven_by_what_it_states() -> None:
    _, own = committed()
    first = HeldStates()
    other = replace(own, host="z", about={**own.about, "snapshot": "s-1-9"})
    assert first.add(replace(other, committed=CommitStatement(("z",), {MATRIX.name: 5})))
    assert first.covered()
    first.forget("z")
    assert first.add(own) and first.covered() and first.stated(4) == own.committed
    first.prove(4, tensor_fingerprints(own.collection, own.fingerprint))


def test_what_was_fetched_and_never_proven_may_be_the_only_copy() -> None:
    generations, own = committed()
    files = (StoredFile("fetched-0.safetensors", 1 << 20),)
    fetched = replace(own, host="b", files=files, unproven=(0,))
    generations.add(fetched)
    assert generations.is_whole_as_written(4)
    generations.forget("a")
    assert generations.covered() and not generations.is_whole_as_written(4)
    generations.prove(4, tensor_fingerprints(own.collection, own.fingerprint))
    assert generations.is_whole_as_written(4)


def test_what_only_a_late_part_holds_is_stated_from_then_on() -> None:
    """The coordinator is another one than that which committed the rest."""
    other = Tensor("exp_avg/v", (4,), "F32")
    here, late = part("a", {"rank-0.safetensors": [WRITTEN]}), part("b", {"r.safetensors": []})
    rows = Collection.of([(other, Box((0,), (4,)))])
    zero = np.zeros(1, np.int64)
    late = replace(
        late, collection=rows, file=zero, begin=zero, fingerprint=np.array([5], np.uint64)
    )
    tensors = {"tensors": 2}
    known = CommitStatement(("a", "b"), {MATRIX.name: fingerprint(WRITTEN)})
    generations = HeldStates()
    generations.add(replace(here, generation=4, committed=known, about={**here.about, **tensors}))
    generations.add_sealed(replace(late, about={**late.about, **tensors}))
    assert list(generations.late()) == [("b", 4)]
    stated = generations.parts(4)["b"].committed
    assert stated is not None and stated.fingerprints == {other.name: 5}
    assert [each.number for each in generations.covered()] == [4]


def test_what_the_job_has_dropped_is_its_own_where_a_disk_still_has_it() -> None:
    """All agents died, and bring what the durable directory keeps beside what they hold."""
    generations, whole = HeldStates(), part("a", {"x": [WRITTEN]})

    def made(number: int, run: str) -> HostManifest:
        about = {**whole.about, "snapshot": f"{run}-1-{number}", "lineage": [["earlier", 2]]}
        return replace(whole, generation=number, step=number, about=about)

    for number in range(1, 10):
        generations.add(made(number, "r" if number > 2 else "earlier"))
        generations.keep(number)
    generations.forget("a")
    assert not generations.covered()
    for own in (made(2, "earlier"), made(7, "r"), made(8, "r"), made(9, "r")):
        assert generations.catalogue.is_known(facts_of(own))
    others = [facts_of(made(number, "other")) for number in (8, 10)]
    assert not any(map(generations.catalogue.is_known, others))


def test_what_is_known_of_generations_that_were_dropped_has_an_end() -> None:
    """A job of months makes hundreds of thousands."""
    generations, whole = HeldStates(), part("a", {"x": [WRITTEN]})
    for number in range(1, 101):
        made = replace(whole, step=number, about={**whole.about, "snapshot": f"r-1-{number}"})
        generations.add_sealed(made)
        generations.commit(number, f"r-1-{number}")
        generations.forget(f"host-{number}", is_released=True)
        assert generations.keep(number) in ((), (number - 1,))
        if number % 10 == 0:
            generations.go_back_to(number - 1)
    known = generations.catalogue
    tables = (known.numbered, known.sealed, known.refused, known.left, generations.survey()[0])
    assert all(len(table) <= 2 for table in tables), tables
    late = replace(whole, generation=50, step=50, about={**whole.about, "snapshot": "r-1-50"})
    assert not generations.add(late), "it was left behind"
    assert generations.offer(late), "a person may go back to what a disk has"
    assert generations.add(late)


# ---------------------------------------------------------------------- how parts travel

HOSTS = tuple(f"node-{number:04d}.rack-{number % 64:02d}" for number in range(2048))


def test_parts_arrive_with_the_hosts_that_they_named_and_each_list_travels_once(
    tmp_path: Path,
) -> None:
    sealed = summary(committed_parts.part(tmp_path, "a", -1, 30, "r-1-30", hosts=list(HOSTS)))
    held = [
        replace(sealed, generation=number, committed=CommitStatement(HOSTS, {"w": 5}))
        for number in (1, 2)
    ]
    plain = replace(sealed, about={k: v for k, v in sealed.about.items() if k != "hosts"})
    lists = HostLists()
    travelling = lists.take(manifest_bytes(each) for each in (sealed, *held, plain))
    assert lists.lists == (HOSTS,)
    assert not any(HOSTS[7].encode() in each.manifest for each in travelling)
    arrived = [read_part(each, lists.lists, "a") for each in travelling]
    sent = [sealed, *held, plain]
    assert all(a.to_json() == b.to_json() for a, b in zip(arrived, sent, strict=True))
    one, other = arrived[1], arrived[2]
    assert one.about["hosts"] is other.about["hosts"], "one copy for all parts of all hosts"
    assert one.committed is not None and other.committed is not None
    assert one.committed.hosts is other.committed.hosts


@pytest.mark.parametrize("place", [1, -2])
def test_a_list_that_is_not_there_is_refused_by_name(tmp_path: Path, place: int) -> None:
    manifest = manifest_bytes(committed_parts.part(tmp_path, "a", 1, 30, "r-1-30"))
    with pytest.raises(UsageError, match=f"a part of a names list {place} of 1 lists of hosts"):
        read_part(BroughtPart(manifest, place, -1), (HOSTS,), "a")
