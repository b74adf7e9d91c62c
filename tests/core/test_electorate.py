"""Who is chosen as a witness, and how an electorate changes."""

from scalai.core.electorate import (
    MOST,
    Candidate,
    Electorate,
    Mandate,
    Record,
    Witness,
    choose,
    following,
)


def witness(name: str, machine: str | None = None) -> Witness:
    return Witness(name, (machine or f"10.0.0.{name}", 1), f"memory of {name}")


def candidates(count: int, domains: int = 0) -> list[Candidate]:
    return [
        Candidate(witness(f"{number:03}"), f"rack {number % domains}" if domains else "")
        for number in range(count)
    ]


def names(found: tuple[Witness, ...]) -> list[str]:
    return [each.host for each in found]


def test_an_odd_number_is_chosen_and_none_of_fewer_than_three_machines() -> None:
    sizes = [len(choose(candidates(count), (), "")) for count in range(9)]
    assert sizes == [0, 0, 0, 3, 3, 5, 5, 7, 7]
    assert len(choose(candidates(2048), (), "")) == MOST


def test_agents_of_one_machine_count_once_and_those_that_nobody_else_reaches_not_at_all() -> None:
    twice = [Candidate(witness(name, "10.0.0.1")) for name in ("a", "b", "c")]
    assert choose([*twice, *candidates(1)], (), "") == ()
    alone = [Candidate(witness(n, f"127.0.0.{n}")) for n in "123"]
    alone += [Candidate(witness(n, n)) for n in ("::1", "localhost")]
    assert choose(alone, (), "") == ()
    found = choose([*twice, *candidates(2)], (witness("b", "10.0.0.1"),), "")
    assert "b" in names(found) and len(found) == 3, "who is a witness stays one"


def test_witnesses_are_kept_and_spread_and_one_is_of_the_coordinators_machine() -> None:
    racks = candidates(12, domains=3)
    found = choose(racks[:-1], (), "10.0.0.007")
    assert "007" in names(found) and len(found) == 11
    found = choose([c for c in racks if c.domain != "rack 2"] + racks[2:3], (), "")
    assert "002" in names(found), "the only one of its rack"
    present = tuple(c.witness for c in candidates(40)[20:35])
    assert choose(candidates(40), present, "") == present
    left = [c for c in candidates(40) if c.witness.host != "020"]
    assert set(present) - set(choose(left, present, "")) == {present[0]}


def record(electorate: Electorate) -> Record:
    return Record(1, "h", 1, 0, False, electorate)


OLD = tuple(witness(name) for name in "abc")
NEW = tuple(witness(name) for name in "bcd")


def test_both_majorities_take_an_electorate_before_the_next_one_counts_alone() -> None:
    joint = following(Mandate(record(Electorate(OLD)), is_agreed=True), NEW)
    assert joint.record.electorate == Electorate(NEW, OLD)
    memories = {w.memory for w in NEW[1:]}
    assert Electorate(NEW).has_majority(memories)
    assert not joint.record.electorate.has_majority(memories), "c and d are no majority of a, b, c"
    agreed = Mandate(joint.record, is_agreed=True, back=joint.back)
    alone = following(agreed, OLD)
    assert alone.record.electorate == Electorate(NEW) and alone.record.beat == 2
    assert following(alone, OLD).record.electorate == Electorate(NEW), "there is no way back"
    assert following(joint).record.electorate == Electorate(OLD), "but before they had agreed"


def test_nobody_is_elected_by_the_first_witnesses_before_a_majority_of_them_has_agreed() -> None:
    first = following(Mandate(record(Electorate()), is_agreed=True), OLD)
    assert first.record.electorate.is_off
    assert following(first).record.electorate == Electorate()
    settled = following(Mandate(first.record, is_agreed=True, back=first.back))
    assert settled.record.electorate == Electorate(OLD) and not settled.record.electorate.is_off
    last = following(Mandate(settled.record, is_agreed=True), ())
    assert last.record.electorate == Electorate((), OLD) and last.record.electorate.is_off
