"""What a job goes on from, waits for, refuses or gives up, by what its hosts and
disks have: one row a case."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from scalai.core.job.catalogue import Catalogue, Contents, NumberStanding, PartFacts, Survey
from scalai.core.job.membership import Generation
from scalai.core.job.outlook import (
    Admittance,
    Course,
    Prospect,
    Situation,
    admit,
    admit_sealed,
    doubtful,
    outlook,
    rival,
)
from scalai.core.job.recovery import Descent, Origin, newest_whole

ALL = "vw"
"""The pieces of a whole state."""
SEALED = -1
TAKEN, OBSOLETE, REFUSED = Admittance


@dataclass(frozen=True)
class Has:
    """A host's part of a state; ``pieces``: of ``ALL``; ``wrote``: hosts that it says wrote it."""

    host: str
    number: int
    step: int
    run: str = "r-1"
    pieces: str = ALL
    wrote: str = ""
    lineage: tuple[tuple[str, int], ...] | None = None
    is_on_disk: bool = False

    @property
    def facts(self) -> PartFacts:
        descent = Descent(self.number, self.run.split("-")[0], self.lineage)
        snapshot = f"{self.run}-{self.step}"
        return PartFacts(self.host, self.number, self.step, snapshot, descent, tuple(self.wrote))


@dataclass
class Known:
    """A catalogue and the parts that hosts hold."""

    catalogue: Catalogue = field(default_factory=Catalogue)
    parts: list[Has] = field(default_factory=list)

    def brings(self, *found: Has) -> "Known":
        for part in found:
            holders = {each.host for each in self.parts if each.number == part.number}
            if part.number == SEALED:
                taken: Catalogue | None = self.catalogue.with_sealed(part.facts)
            elif part.is_on_disk:
                taken = self.catalogue.offered(part.facts, holders)
            else:
                taken = self.catalogue.added(part.facts, holders)
            if taken is not None:
                self.catalogue = taken
                self.parts.append(part)
        return self

    def commits(self, number: int, of: Has) -> "Known":
        name, hosts = of.facts.snapshot, {each.host for each in self.parts if each.step == of.step}
        self.catalogue = self.catalogue.committed(
            name, number, of.facts.descent, hosts, Origin.SEALED
        )
        self.parts.append(Has(of.host, number, of.step, of.run))
        return self

    @property
    def survey(self) -> Survey:
        held, sealed = dict[int, Contents](), dict[str, frozenset[str]]()
        for number in {part.number for part in self.parts}:
            here = [part for part in self.parts if part.number == number]
            hosts = frozenset(part.host for part in here)
            is_whole = {*"".join(part.pieces for part in here)} == {*ALL}
            wrote = tuple(sorted({*"".join(part.wrote for part in here)}))
            held[number] = Contents(hosts, is_whole, wrote)
        for part in self.parts:
            if part.number == SEALED:
                name = part.facts.snapshot
                sealed[name] = sealed.get(name, frozenset()) | {part.host}
        return Survey(held, sealed)

    def outlook(self, hosts: str, **course: Any) -> Prospect:
        return outlook(self.catalogue, self.survey, hosts, Course("j", **course))


def numbers(found: Prospect) -> list[int]:
    return [each.number for each in found.generations]


NEW, RUNS = {"has_begun": False}, {"has_begun": True}
OLD = Has("a", 3, 20)
HALF_A, HALF_B = Has("a", 4, 30, pieces="v", wrote="ab"), Has("b", 4, 30, pieces="w", wrote="ab")
SEALED_A, SEALED_B = (
    Has(host, SEALED, 30, pieces=piece, wrote="ab") for host, piece in zip("ab", ALL, strict=True)
)
OURS = Has("a", 8, 90, "ours-1", lineage=(("old", 5),))
THEIRS = Has("b", 7, 400, "theirs-1", lineage=(("old", 5),))
DISK = Has("b", 7, 50, "other-1", is_on_disk=True)
FRESH_WAY = "or begin anew: stop the job and start it with --fresh"

OUTLOOKS: dict[str, tuple[Sequence[Has], dict[str, Any], list[int], str, bool]] = {
    # parts, course -> whole generations oldest first, words of the obstacle, held back
    "nothing is there": ((), NEW, [], "^$", False),
    "the newest is whole": ((OLD, HALF_A, HALF_B), NEW, [3, 4], "^$", False),
    "two hosts hold it together": ((HALF_A, HALF_B), NEW, [4], "^$", False),
    "a newer part": (
        (OLD, HALF_A), NEW, [3],
        r"because generation 4 of step 30 is not whole \(hosts \['a'\] hold parts, those of"
        r" \['b'\] are"
        r" missing\)\. Start the agents of \['b'\] where their memory or their --durable-dir"
        r" holds it, or"
        r" go on from generation 3 of step 20, 10 steps back: scalai resume --job j"
        r" --generation 3, "
        + FRESH_WAY, True,
    ),
    "a newer part without an older state": (
        (HALF_A,), NEW, [],
        r"generation 4 of step 30 is not whole.*Start the agents of \['b'\].*--fresh$", True,
    ),
    "a newer part that names nobody": (
        (OLD, Has("a", 4, 30, pieces="v")), NEW, [3],
        "Start the hosts whose memory or --durable-dir holds the rest", True,
    ),
    "a newer part, and the job trains": ((OLD, HALF_A), RUNS, [3], "generation 4", False),
    "a newer part, and all hosts were lost": (
        (OLD, HALF_A), {"has_begun": True, "has_lost_all": True}, [3], "scalai resume", True,
    ),
    "a newer part, and a successor": (
        (OLD, HALF_A), {"has_begun": False, "is_successor": True}, [3], "generation 4", True,
    ),
    "an older state alone on a disk": ((HALF_A, DISK), RUNS, [7], "generation 7 of step 50", True),
    "the job's own state on a disk": (
        (HALF_A, Has("b", 3, 20, is_on_disk=True)), {"has_begun": True, "archived": (3,)}, [3],
        "is not whole", False,
    ),
    "a disk's higher number beside what hosts hold": ((OLD, DISK), RUNS, [7, 3], "^$", False),
    "the job went back": ((Has("a", 4, 30), Has("a", 5, 25, "r-2")), NEW, [4, 5], "^$", False),
    "a higher number that another state contains": (
        (Has("a", 9, 90, "old-2", lineage=()), Has("b", 7, 400, "new-1", lineage=(("old", 9),))),
        NEW, [9, 7], "^$", False,
    ),
    "two runs went on apart": (
        (OURS, THEIRS), NEW, [7, 8],
        r"because two runs of the job went on apart, and left generation 7 of step 400 and"
        r" generation 8 of"
        r" step 90: neither contains.*--generation 7, or scalai resume --job j --generation 8$",
        True,
    ),
    "two runs went on apart, and the job trains": ((OURS, THEIRS), RUNS, [7, 8], "^$", False),
    "a first snapshot in part": (
        (SEALED_A,), NEW, [],
        r"because what was sealed at step 30 is not whole \(hosts \['a'\] hold parts, those of"
        r" \['b'\] are"
        r" missing\), and nothing else is there\. Start the agents of \['b'\].*--fresh$", True,
    ),
    "a first snapshot in part, and an older state": ((OLD, SEALED_A), NEW, [3], "^$", False),
}  # fmt: skip


@pytest.mark.fault
@pytest.mark.parametrize("case", OUTLOOKS, ids=str)
def test_a_job_goes_on_from_the_newest_whole_state_or_waits_and_says_why(case: str) -> None:
    parts, course, whole, words, is_held_back = OUTLOOKS[case]
    known = Known().brings(*parts)
    found = known.outlook("".join(part.host for part in parts), **course)
    assert numbers(found) == whole
    assert re.search(words, found.obstacle), found.obstacle
    assert found.is_held_back is is_held_back and found.loss == ""


@pytest.mark.fault
def test_what_was_sealed_is_waited_for_though_its_holder_has_gone() -> None:
    known = Known().brings(SEALED_A)
    known.parts.clear()
    found = known.outlook("c", **NEW)
    assert found.is_held_back and "(the parts of ['a', 'b'] are missing)" in found.obstacle
    known.catalogue = known.catalogue.without_sealed({SEALED_A.facts.snapshot})
    assert not known.outlook("c", **NEW).obstacle, "it was given up"


@pytest.mark.fault
def test_all_that_are_to_hold_it_are_there_and_it_is_not_whole() -> None:
    assert not Known().brings(SEALED_A).outlook("ab", **NEW).obstacle, "nobody may bring the rest"


def test_a_host_that_was_released_is_not_waited_for() -> None:
    known = Known().brings(OLD, HALF_A)
    known.catalogue = known.catalogue.released("b")
    assert "those of" not in known.outlook("a", **NEW).obstacle
    assert "those of" not in known.brings(HALF_B).outlook("ab", **NEW).obstacle


@pytest.mark.fault
@pytest.mark.parametrize("older", [(), (OLD,)], ids=["nothing older", "an older one"])
def test_replicas_that_differ_are_no_state_and_a_person_decides(older: tuple[Has, ...]) -> None:
    known = Known().brings(*older, SEALED_A, SEALED_B)
    name, why = SEALED_A.facts.snapshot, "replicas of 'w' differ."
    known.catalogue = known.catalogue.with_refused(name, "ab", why)
    found = known.outlook("ab", **NEW)
    assert re.search(
        r"hosts \['a', 'b'\] sealed at step 30 is refused: replicas of 'w' differ\.", found.obstacle
    )
    assert "scalai clean" in found.obstacle and found.obstacle.endswith(FRESH_WAY)
    assert ("scalai resume --job j --generation 3" in found.obstacle) is bool(older)
    assert admit_sealed(SEALED_A.facts, (), situation(known), lambda: True)[0] is OBSOLETE
    known.brings(Has("a", SEALED, 31)).commits(5, Has("a", SEALED, 31))
    assert not known.outlook("ab", **NEW).obstacle, "something as far is committed"


@pytest.mark.fault
@pytest.mark.parametrize(
    ("parts", "is_named"),
    [((), True), ((OLD,), True), ((Has("b", 3, 20, wrote="ab"),), False)],
    ids=["nothing else", "another state", "the others have all that it wrote"],
)
def test_a_sealed_part_that_cannot_be_read_is_named(parts: tuple[Has, ...], is_named: bool) -> None:
    known = Known().brings(*parts)
    known.catalogue = known.catalogue.with_unread("a", ["/s/snapshot-4 is damaged."])
    found = known.outlook("ab", **NEW)
    words = (
        r"sealed last cannot be read \(host 'a': /s/snapshot-4 is damaged\.\)\. Repair it.*--fresh"
    )
    assert bool(re.search(words, found.obstacle)) is is_named, found.obstacle
    known.catalogue = known.catalogue.with_unread("a", ())
    assert not known.outlook("ab", **NEW).obstacle, "somebody has moved it away"


# ---------------------------------------------------------------------- damage


@pytest.mark.fault
def test_nothing_but_damage_is_a_state_too() -> None:
    found = Known(Catalogue().with_damage("a", 1, "its manifest is torn")).outlook("a", **NEW)
    assert "generation 1 is not whole (host 'a': its manifest is torn)" in found.obstacle
    assert found.is_held_back and found.generations == ()


def test_a_damaged_newest_generation_is_waited_for_and_named() -> None:
    known = Known().brings(OLD)
    known.catalogue = known.catalogue.with_damage("a", 5, "/x is torn")
    found = known.outlook("a", **NEW)
    assert (
        "generation 5 is not whole (host 'a': /x is torn)" in found.obstacle and found.is_held_back
    )
    assert "generation 3 of step 20: scalai resume" in found.obstacle and not found.loss
    known.catalogue = known.catalogue.gave_up_after(3, known.survey)
    assert not known.outlook("a", **NEW).obstacle
    again = known.catalogue.with_damage("b", 5, "/y is torn too")
    assert again == known.catalogue, "it was given up"


@pytest.mark.parametrize(
    ("parts", "damage", "loss"),
    [
        ((Has("a", 4, 30, pieces=""),), {"a": "'w' differs"},
        r"generation 4 of step 30 is not whole .*'w' differs\), and nothing else is whole\."
        r" The state is kept"),
        ((Has("a", 4, 30, pieces="", wrote="ab"),), {"a": "'w' differs"}, "^$"),
        ((OLD, Has("a", 4, 30, pieces="")), {"a": "'w' differs"}, "^$"),
        ((HALF_A, HALF_B), {"a": "'w' differs"}, "^$"),
    ],
    ids=["nothing else", "an absent host may have it", "an older state", "others have it"],
)  # fmt: skip
def test_damage_ends_a_job_only_where_nobody_can_mend_it(
    parts: tuple[Has, ...], damage: dict[str, str], loss: str
) -> None:
    known = Known().brings(*parts)
    for host, line in damage.items():
        known.catalogue = known.catalogue.examined(host, 4, "/d", [line])
    found = known.outlook("ab", **RUNS)
    assert re.search(loss, found.loss), found.loss
    assert known.catalogue.found_damage() == ((4, "a"),)


def test_damage_of_what_the_job_has_left_behind_is_no_news() -> None:
    known = Known().brings(OLD)
    assert known.catalogue.examined("c", 2, "/d", ["'w' differs"]) == known.catalogue


def test_a_second_failed_proof_names_where_the_parts_lie_unless_one_passed() -> None:
    known = Known().brings(OLD)
    first, is_second = known.catalogue.failed_proof(3)
    assert not is_second
    read = first.examined("a", 3, "/d", ())
    again, is_second = read.failed_proof(3)
    assert is_second
    text = doubtful(again, known.survey, 3, "it differs.")
    assert "generation 3 of step 20 cannot be gone on from, twice: it differs." in text
    assert "'a' (/d)" in text and "--fresh" in text
    assert not read.passed_proof(3).failed_proof(3)[1]
    assert not read.examined("a", 3, "/d", ["'w' differs"]).failed_proof(3)[1]


# ---------------------------------------------------------------------- what joining hosts bring


def situation(
    known: Known, round: int = 0, newest: Generation | None = None, **more: Any
) -> Situation:
    return Situation("j", "now", round, known.catalogue, known.survey, newest, **more)


AT_40 = Generation(7, 40, frozenset("a"))
FOREIGN = Has("b", 6, 30, "other-1")

ADMITTED: dict[str, tuple[Sequence[Has], Has, int, Admittance, str]] = {
    # what is known, what a host brings, the job's round -> what becomes of it
    "nothing is known yet": ((), OLD, 0, TAKEN, ""),
    "the rest of what is known": ((HALF_A,), HALF_B, 0, TAKEN, ""),
    "another state of a number": (
        (Has("a", 3, 20, "of-a"),), Has("b", 3, 30, "of-b"), 0, REFUSED,
        r"host 'b' holds generation 3 of step 30 of another run of job 'j' than hosts \['a'\],"
        r" whose generation"
        r" 3 is of step 20\..*scalai clean",
    ),
    "the job's own": ((FOREIGN,), FOREIGN, 1, TAKEN, ""),
    "passed by a job that has begun": ((), FOREIGN, 1, OBSOLETE, ""),
    "as far as a job that has begun": ((), Has("b", 6, 40, "other-1"), 1, OBSOLETE, ""),
    "further than a job that has begun": (
        (), Has("b", 6, 41, "other-1"), 1, REFUSED,
        "has begun without it and is at step 40.*scalai clean",
    ),
}  # fmt: skip


@pytest.mark.fault
@pytest.mark.parametrize("case", ADMITTED, ids=str)
def test_a_part_of_a_generation_is_taken_goes_or_is_refused_by_name(case: str) -> None:
    there, brought, round, expected, words = ADMITTED[case]
    now = situation(Known().brings(*there), round, AT_40)
    verdict, why = admit(brought.facts, now)
    assert verdict is expected and re.search(words, why), why


def test_a_job_without_any_state_does_not_say_at_which_step_it_is() -> None:
    verdict, why = admit(FOREIGN.facts, situation(Known(), 1))
    assert verdict is REFUSED and "is at step" not in why


OTHER = Has("c", SEALED, 500, "otherrun-3")
SEALED_SOMEWHERE: dict[
    str, tuple[Sequence[Has], Sequence[Has], Has, int, bool, Admittance, str]
] = {
    # what is known, what the host holds, what it has sealed, round, whether that is whole
    "nothing is known": ((), (), OTHER, 0, True, TAKEN, ""),
    "of this round": ((OLD,), (), Has("c", SEALED, 25, "now-2"), 2, False, TAKEN, ""),
    "of this round, and passed": (
        (OLD,), (), Has("c", SEALED, 15, "now-2"), 2, True, OBSOLETE, "",
    ),
    "of an earlier round of this run": (
        (OLD,), (), Has("c", SEALED, 500, "now-1"), 2, True, OBSOLETE, "",
    ),
    "whole, of another run, and the job has begun": (
        (OLD,), (), OTHER, 2, True, REFUSED,
        r"host 'c' has sealed a whole state of step 500 in another run of job 'j', which was"
        r" not committed; hosts"
        r" \['a'\] hold generation 3 of step 20\. Which one.*scalai clean",
    ),
    "whole, of another run, and the job has begun without a state": (
        (), (), OTHER, 2, True, REFUSED, "this run has begun without it",
    ),
    "half, of another run, and the job has begun": (
        (OLD,), (), OTHER, 2, False, OBSOLETE, "",
    ),
    "whole, of another run than the committed one": (
        (OLD,), (), OTHER, 0, True, REFUSED, r"\['a'\] hold generation 3",
    ),
    "half, of another run than the committed one": ((OLD,), (), OTHER, 0, False, TAKEN, ""),
    "behind what others hold": (
        (OLD,), (), Has("c", SEALED, 9, "x-1"), 0, True, OBSOLETE, "",
    ),
    "of the run of the newest, later": (
        (OLD,), (), Has("c", SEALED, 30, "r-1"), 0, True, TAKEN, "",
    ),
    "of a round that the run has left": (
        (Has("a", 5, 25, "r-2"),), (), Has("b", SEALED, 30, "r-1"), 0, True, OBSOLETE, "",
    ),
    "behind what its own host holds": (
        (), (Has("c", 3, 20),), Has("c", SEALED, 25, "next-1"), 0, True, TAKEN, "",
    ),
    "with what a holder of the newest has sealed": (
        (OLD, Has("a", SEALED, 25, "next-1", "v")), (), Has("b", SEALED, 25, "next-1", "w"), 0,
        True, TAKEN, "",
    ),
    "committed meanwhile": (
        (Has("a", 4, 30),), (), Has("b", SEALED, 30, "r-1"), 3, True, TAKEN, "",
    ),
}  # fmt: skip


@pytest.mark.fault
@pytest.mark.parametrize("case", SEALED_SOMEWHERE, ids=str)
def test_a_sealed_part_counts_is_given_up_or_is_refused_by_name(case: str) -> None:
    there, held, part, round, is_whole, expected, words = SEALED_SOMEWHERE[case]
    now = situation(Known().brings(*there), round)
    own = [each.facts for each in held]
    verdict, why = admit_sealed(part.facts, own, now, lambda: is_whole)
    assert verdict is expected and re.search(words, why), why


def test_a_fresh_job_gives_up_whole_states_of_other_runs() -> None:
    now = situation(Known().brings(OLD), 2, is_fresh=True)
    assert admit_sealed(OTHER.facts, (), now, lambda: True)[0] is OBSOLETE


@pytest.mark.fault
def test_a_sealed_state_is_not_left_for_a_committed_one_of_another_run_that_is_less_far() -> None:
    sealed = Has("a", SEALED, 500)
    known = Known().brings(sealed).commits(1, sealed)
    why = rival([Has("c", 7, 20, "otherrun-3").facts], situation(known))
    assert re.search(
        r"'c' holds generation 7 of step 20 .*\['a'\] hold generation 1 of step 500, as it was"
        r" sealed",
        why,
    )
    for part in (Has("c", 7, 600, "otherrun-3"), Has("c", 7, 20, "r-0")):
        assert not rival([part.facts], situation(known)), "further, or of the same run"
    assert not rival([OTHER.facts], situation(known, round=1)) and not rival([], situation(known))


# ---------------------------------------------------------------------- what is left behind


@pytest.mark.fault
def test_what_a_person_gave_up_is_dropped_at_the_next_start_and_never_comes_back() -> None:
    known = Known().brings(OLD, HALF_A, OURS)
    known.catalogue = known.catalogue.gave_up_after(3, known.survey)
    assert known.catalogue.added(HALF_B.facts, ()) is None
    assert known.catalogue.offered(HALF_B.facts, ()) is None
    sealed = Has("b", SEALED, 30)
    assert admit_sealed(sealed.facts, (), situation(known), lambda: True)[0] is OBSOLETE
    back, dropped = known.catalogue.gone_back_to(3)
    assert dropped == (4, 8) and back.gone_back_to(3)[1] == ()


def test_a_person_gives_up_a_run_that_went_on_apart_whatever_its_numbers() -> None:
    known = Known().brings(OURS, THEIRS)
    known.catalogue = known.catalogue.gave_up_after(8, known.survey)
    assert known.catalogue.gone_back_to(8)[1] == (7,)


def test_a_person_goes_on_from_a_disk_and_it_counts_as_the_jobs_own() -> None:
    known = Known().brings(HALF_A, DISK)
    chosen = known.catalogue.gave_up_after(7, known.survey)
    assert known.catalogue.is_offered(7) and not chosen.is_offered(7)


def test_where_a_job_goes_back_later_parts_are_of_no_use() -> None:
    back, dropped = Known().brings(OLD, HALF_A).catalogue.gone_back_to(3)
    assert dropped == (4,) and back.added(HALF_B.facts, ()) is None


def test_what_is_set_aside_goes_with_the_first_state_of_the_jobs_own() -> None:
    sealed = Has("a", SEALED, 0, "now-1")
    known = Known(Catalogue().with_aside(7)).brings(sealed)
    assert not known.catalogue.is_known(Has("a", 7, 20).facts) and not known.catalogue.has(7)
    kept, dropped = known.commits(8, sealed).catalogue.keeping(8, "a")
    assert dropped == (7,) and kept.keeping(8, "a")[1] == ()


def test_what_was_dropped_is_not_taken_and_a_disk_may_still_offer_it() -> None:
    known = Known().brings(OLD, Has("a", 4, 30))
    known.catalogue, dropped = known.catalogue.keeping(4, "a")
    assert dropped == (3,) and known.catalogue.added(OLD.facts, ()) is None
    offered = known.catalogue.offered(OLD.facts, ())
    assert offered is not None and offered.numbered[3].standing is NumberStanding.OFFERED


# ---------------------------------------------------------------------- the line that says so


def test_the_line_of_a_recovery_names_each_candidate_and_why_not() -> None:
    known = Known().brings(OLD, HALF_A, SEALED_A, DISK)
    known.catalogue = known.catalogue.with_failure(35, "1 of 2 tensors are held by ['a'].")
    found = str(newest_whole(known.catalogue.states("a", known.survey)))
    assert found.startswith("step=20 from='what hosts held before' hosts=a passed_over=")
    for text in (
        "workers that outlived a failure of step 35: 1 of 2 tensors are held by ['a'].",
        "a snapshot that was not committed of step 30: the parts of ['b'] are missing",
        "generation 4 of step 30: hosts ['a'] hold parts, those of ['b'] are missing",
        "generation 7 of step 50: the job has gone on without it",
    ):
        assert text in found, found
    contained = Known().brings(*OUTLOOKS["a higher number that another state contains"][0])
    found = str(newest_whole(contained.catalogue.states("ab", contained.survey)))
    assert found.startswith("step=400") and "generation 7 goes on from it" in found
