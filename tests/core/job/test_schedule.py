"""At which steps snapshots are: all ranks count alike, also one that learns of a change late."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalai.core.job.spacing import Schedule


def test_snapshots_are_at_multiples_and_not_before_the_first_step() -> None:
    assert [step for step in range(13) if Schedule(4).is_due(step)] == [4, 8, 12]
    assert [step for step in range(13) if Schedule(4, 5).is_due(step)] == [5, 9]
    assert not any(Schedule(0).is_due(step) for step in range(13))


@pytest.mark.fault
@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 30), st.integers(0, 60))
def test_who_learns_late_is_where_all_others_are_from_then_on(
    before: int, after: int, begin: int, heard: int
) -> None:
    told = Schedule(after, begin)

    def made(heard: int) -> list[int]:
        schedule, steps = Schedule(before), []
        for step in range(1, 100):
            schedule = schedule.at(step, told if step >= heard else None)
            steps += [step] if schedule.is_due(step) else []
        return steps

    soon, late = made(0), made(heard)
    assert [step for step in soon if step >= heard] == [step for step in late if step >= heard]
    if heard <= begin:
        assert soon == late, "who hears of it in time never differs"
