"""Which parts of generations a job takes from a host that joins."""

from dataclasses import replace

from scalai.core.job.admission import Brought, Verdict, admit
from scalai.core.job.membership import Generation

NEWEST = Generation(7, 40, frozenset("a"))
PART = Brought("b", 6, 30, is_known=False)


def test_before_a_job_has_begun_whatever_is_there_may_be_its_state() -> None:
    assert admit(PART, "j", None, has_begun=False) == (Verdict.TAKEN, "")


def test_two_states_of_one_number_are_a_persons_to_choose_from() -> None:
    part = replace(PART, others=("c", "a"), their_step=12)
    verdict, why = admit(part, "j", None, has_begun=False)
    assert verdict is Verdict.REFUSED
    assert "host 'b'" in why and "['a', 'c']" in why and "step 30" in why and "step 12" in why


def test_a_job_that_has_begun_takes_what_it_has_made() -> None:
    known = replace(PART, is_known=True, step=99)
    assert admit(known, "j", NEWEST, has_begun=True) == (Verdict.TAKEN, "")


def test_what_a_job_has_passed_goes() -> None:
    for step in (30, 40):
        part = replace(PART, step=step, others=("a",))
        assert admit(part, "j", NEWEST, has_begun=True) == (Verdict.OBSOLETE, "")


def test_what_is_further_than_the_job_is_refused_and_never_goes_unsaid() -> None:
    verdict, why = admit(replace(PART, step=41), "j", NEWEST, has_begun=True)
    assert verdict is Verdict.REFUSED and "and is at step 40" in why
    verdict, why = admit(PART, "j", None, has_begun=True)
    assert verdict is Verdict.REFUSED and "is at step" not in why
