"""What a script does from its beginning on in a later round is compared with what it did before."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalai.patches.deepspeed.record import ScriptRecord, Stretches


@given(st.lists(st.sampled_from("aab"), max_size=60), st.integers(0, 40))
def test_what_is_folded_is_kept_whole(letters: list[str], times: int) -> None:
    given = [[letter, f"{letter}'s event"] for letter in letters] * (1 + times % 4)
    kept = Stretches()
    for stretch in given:
        assert not kept.add(stretch)
    assert list(Stretches(json.loads(json.dumps(kept.nodes)))) == given


def test_a_million_regular_passes_need_no_more_than_a_few() -> None:
    kept = Stretches()
    for epoch in range(20_000):
        kept.add(["a pass", "an evaluation"] + ["a save"] * (epoch % 5 == 4))
    assert len(json.dumps(kept.nodes)) < 200 and sum(1 for _ in kept) == 20_000


def test_of_a_record_that_has_become_too_long_the_newest_part_is_kept_and_that_is_said() -> None:
    said: list[str] = []
    record = ScriptRecord(lambda *words: said.append("differs"), said.append, str)
    for number in range(4000):
        record.begin("a pass", is_over=False)
        record.stepped()
        record.note(f"a seed of {number**2}")
    saved = json.loads(json.dumps(record.take()))
    assert len(json.dumps(saved)) <= 64 << 10
    assert said and all("KiB" in detail for detail in said)
    kept = list(Stretches(saved["over"], saved["dropped"]))
    assert len(kept) == 4000 and kept[0] is None and kept[-1] == ["a pass", f"a seed of {3998**2}"]
    said.clear()
    then = ScriptRecord(lambda *words: said.append("differs"), said.append, str)
    then.put(saved)
    for number in range(3999):  # of the dropped ones nothing is known
        then.begin("a pass", is_over=True)
        then.note(f"a seed of {number**2 if number >= saved['dropped'] - 1 else 0}")
    assert not said


class Job:
    """Rounds of a script over five passes of two steps."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._saved: Any = None
        self._done = 0

    def play(
        self, stop_at: int, script: Callable[[ScriptRecord, int], None], first: str = ""
    ) -> None:
        """Run a round from the script's beginning to a step.

        Args:
            script: What it does behind a pass of this number.
            first: What it does before its engine is there.
        """
        record = ScriptRecord(
            lambda *words: self.said.append(": ".join(words[::-1])), print, self._place
        )
        record.note(first)
        if self._saved is not None:
            record.put(json.loads(json.dumps(self._saved)))
        record.note("a load of newest")
        record.note_told("a loader of 2 micro-batches")
        steps = 0
        for number in range(5):
            is_over = steps + 2 <= self._done
            record.begin("a pass over loader-0", is_over=is_over)
            for _ in range(2):
                steps += 1
                if steps > self._done:
                    record.stepped()
                    record.note("an evaluation")
                    record.note(f"what follows from step {steps}")
                if steps == stop_at:
                    if steps % 2 == 0:  # a job stops where its next step begins
                        script(record, number)
                        record.begin("a pass over loader-0", is_over=False)
                    self._saved, self._done = record.take(), steps
                    return
            script(record, number)

    @staticmethod
    def _place() -> str:
        return "train.py:7"


def usual(record: ScriptRecord, number: int, last: str = "") -> None:
    for _ in range(3):
        record.note("an evaluation")
    if number % 2:
        record.note("a save of epoch_#")
    if last:
        record.note(last)


@pytest.mark.parametrize("stops", [(1, 3, 9), (2, 4, 8), (5, 6, 7)], ids=str)
def test_a_script_that_does_the_same_again_is_not_told_of(stops: tuple[int, ...]) -> None:
    """In any round, wherever it was left; nor one that leaves out what was done."""
    job = Job()
    for stop in stops:
        job.play(stop, usual, "a seed of 5")
    job.play(10, lambda record, number: None, "a seed of 5")
    assert not job.said


@pytest.mark.parametrize(
    ("script", "first", "said"),
    [
        (
            lambda record, number: record.note("a save of best"),
            "a seed of 5",
            "train.py:7: behind pass 1 the script has a save of best, and had ",
        ),
        (
            lambda record, number: usual(record, number, "an evaluation"),
            "a seed of 5",
            "train.py:7: behind pass 2 the script has an evaluation, and had a save of epoch_#",
        ),
        (usual, "a seed of 6", "at its beginning the script has a seed of 6, and had a seed of 5"),
        (
            lambda record, number: record.begin("a pass over loader-1", is_over=True),
            "a seed of 5",
            "begins a pass over loader-1, and began a pass over loader-0 then",
        ),
    ],
    ids=["a save more", "another order", "a seed", "other data"],
)
def test_a_script_that_does_something_else_is_told_the_line_then_and_now_once(
    script: Callable[[ScriptRecord, int], None], first: str, said: str
) -> None:
    job = Job()
    job.play(7, usual, "a seed of 5")
    job.play(8, script, first)
    (told,) = job.said
    assert said in told and ("is_replaying" in told) == ("beginning" not in said)


def test_arguments_that_a_person_has_changed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    monkeypatch.setattr(sys, "argv", ["train.py", "--seed", "5"])
    job.play(7, usual, "a seed of 5")
    monkeypatch.setattr(sys, "argv", ["train.py", "--seed", "6"])
    job.play(8, usual, "a seed of 6")
    (told,) = job.said
    assert "Its arguments have changed: 5, 6." in told


def test_a_checkpoint_that_is_newer_begins_the_record_anew() -> None:
    said: list[Any] = []
    record = ScriptRecord(lambda *words: said.append(words), said.append, str)
    record.begin("a pass", is_over=False)
    record.stepped()
    record.begin("a pass", is_over=False)
    saved = record.take()
    then = ScriptRecord(lambda *words: said.append(words), said.append, str)
    then.put(saved)
    then.note("a load of newest")
    then.restart()
    then.begin("another pass", is_over=False)
    then.stepped()
    taken = then.take()
    assert isinstance(taken, dict) and taken["over"] == [["its beginning", "a load of newest"]]
    assert taken["newest"] == ["another pass"] and not said
    then.note("an evaluation")
    then.begin("a third pass", is_over=False)
    assert taken["newest"] == ["another pass"] and len(taken["over"]) == 1, "it is of its time"


def test_a_loaders_workers_that_are_forked_are_compared_with_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They seed themselves, and what the first round's had noted was gone with them."""
    said: list[str] = []
    record = ScriptRecord(lambda *words: said.append("differs"), said.append, str)
    record.note("a seed of 7")
    record.stepped()
    then = ScriptRecord(lambda *words: said.append("differs"), said.append, str)
    then.put(json.loads(json.dumps(record.take())))
    then.note("a seed of 7")
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    then.note("a seed of 8")
    assert not said
    monkeypatch.undo()
    then.note("a seed of 8")
    assert said == ["differs"]
