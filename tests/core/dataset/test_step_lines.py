from typing import Any

import pytest

from scalai.core.dataset.step_lines import (
    StepEntry,
    StepLine,
    judge_lines,
    line_text,
    read_lines,
    united,
)
from scalai.core.errors import StoreError

Files = dict[str, tuple[tuple[StepLine, ...], bool]]


def line(step: int, round: int = 0, run: str = "r", **values: Any) -> StepLine:
    given = {"samples_hash": None, "loss": None, "rate": None, "consumed_samples": 8 * step}
    return StepLine(run, round, step, **{**given, **values})


def files(*ranks: list[StepLine]) -> Files:
    return {f"rank-{number}.jsonl": (tuple(each), False) for number, each in enumerate(ranks)}


def hashed(step: int, round: int = 0, value: int = 0, **values: Any) -> StepLine:
    return line(step, round, samples_hash=value or step, **values)


def test_a_step_unites_what_replicas_and_stages_know() -> None:
    ranks = [
        [line(1, samples_hash=2**64 - 1, rate=0.1)], [line(1, samples_hash=3, rate=0.1)],
        [line(1, loss=2.5, rate=0.1)],
    ]  # fmt: skip
    assert united(ranks)[1] == StepEntry(0, 1, 8, samples_hash=2, loss=2.5, lr=0.1)


def test_of_a_step_done_twice_the_newest_round_counts() -> None:
    one = [line(1, samples_hash=4), line(2, samples_hash=5), line(2, 1, samples_hash=7)]
    assert [entry.samples_hash for entry in united([one]).values()] == [4, 7]


def test_a_job_that_was_started_again_counts_its_rounds_anew() -> None:
    one = [hashed(1, 1), hashed(2, 1), hashed(3, 1, run="s"), hashed(4, 1, run="s")]
    assert judge_lines(files(one)).is_kept
    again = [hashed(1, 5), hashed(2, 5), hashed(2, 1, 9, run="s")]
    assert united([again])[2].samples_hash == 9, "of the later run"


@pytest.mark.fault
def test_lines_survive_being_written_and_a_torn_one_is_left_out() -> None:
    text = line_text(line(1, rate=0.5)) + line_text(line(2, loss=1.5))
    assert read_lines(text, "f") == ((line(1, rate=0.5), line(2, loss=1.5)), False)
    found, is_torn = read_lines(text[:-9], "f")
    assert found == (line(1, rate=0.5),) and is_torn
    torn = judge_lines({"rank-0.jsonl": (found, is_torn)})
    assert torn.is_kept and torn.notes == ("rank-0.jsonl: its last line was torn",)


@pytest.mark.parametrize("damaged", ["{", "[]", '{"round": 1}', ""])
def test_damage_before_the_last_line_is_no_tear(damaged: str) -> None:
    with pytest.raises(StoreError, match=r"line 2 of rank-0\.jsonl is damaged"):
        read_lines(line_text(line(1)) + damaged + "\n" + line_text(line(3)), "rank-0.jsonl")


def test_steps_that_were_lost_and_done_again_with_the_same_samples_are_told() -> None:
    one = [hashed(s) for s in (1, 2, 3, 4)] + [hashed(s, 1) for s in (3, 4, 5)]
    found = judge_lines(files(one))
    assert found.is_kept and found.notes == ("steps 3 to 4 of round 0 were lost and done again",)


@pytest.mark.fault
def test_a_worker_that_was_killed_before_it_wrote_proves_nothing_against_the_others() -> None:
    full, killed = [hashed(s) for s in (1, 2, 3)], [hashed(s) for s in (1, 2)]
    again = [hashed(s, 1, 2 * s) for s in (3, 4)]
    assert judge_lines(files([*full, *again], killed)).is_kept


@pytest.mark.fault
@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([hashed(1), hashed(3)], "steps 2 to 2 are in no file"),
        ([hashed(1), hashed(2, consumed_samples=8)], "step 2 ends at 8 samples"),
        ([hashed(1), hashed(2), hashed(2, 1, 7)], "step 2 had other samples when round 1"),
        ([hashed(1), hashed(2), hashed(2, 1, consumed_samples=17)], "step 2 had other samples"),
        ([hashed(1), hashed(2), hashed(2)], "two processes have written it"),
        ([hashed(1), hashed(2), hashed(1)], "two processes have written it"),
    ],
)  # fmt: skip
def test_what_breaks_the_order_is_found(lines: list[StepLine], text: str) -> None:
    assert text in " ".join(judge_lines(files(lines)).breaks)
