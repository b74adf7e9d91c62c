"""The demonstration's checks find what they promise to find."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from demo_frameworks import FRAMEWORKS
from demo_picture import draw
from demo_story import Check, Run, Step, check, pause_s, read_run
from demo_words import change_line, check_lines, end_line, introduction, phase_table

from scalai.launch.commands.job_history import History, Resize, difference, read_resize
from scalai.launch.coordinator.timeline import PHASES

STEPS = 12
STORY = FRAMEWORKS["megatron"].story
FIRST = {"param/w": 1, "exp_avg/w": 2}


def run(steps: int = STEPS) -> Run:
    """A run with a pause of two seconds after step 4, steps of half a second."""
    lines = tuple(
        Step(step, 5.0 - step / 10, step * 1e-4, step / 2 + (2.0 if step > 4 else 0.0))
        for step in range(1, steps + 1)
    )
    return Run(lines, tuple((step, step * 7) for step in range(1, steps + 1)))


def resizes() -> list[Resize]:
    return [
        read_resize(
            {
                "step": 2 * (number - 1), "after": change.degrees, "workers": {"a": number},
                "tensors": 8, "bytes_local": 400, "bytes_remote": 600, "at": 3.0 * number,
                "seconds": dict.fromkeys(PHASES, 0.1),
                **({"proven": 8, "paused_s": 0.8} if number > 1 else {}),
            }
        )
        for number, change in enumerate(STORY, start=1)
    ]  # fmt: skip


def verdicts(
    elastic: Run | None = None,
    reference: Run | None = None,
    rounds: Sequence[Resize] | None = None,
    first: dict[str, int] | None = None,
    saved: int = STEPS,
) -> list[str]:
    """Return the promises that are not kept."""
    checks: tuple[Check, ...] = check(
        elastic or run(),
        reference or run(),
        resizes() if rounds is None else rounds,
        (FIRST, FIRST if first is None else first),
        saved,
        STORY,
    )
    return [one.promise for one in checks if not one.is_kept]


def changed(run: Run, step: int, loss: float | None = None, lr: float | None = None) -> Run:
    """Return the run with another loss or learning rate at one step."""
    lines = [
        replace(line, loss=line.loss if loss is None else loss, lr=line.lr if lr is None else lr)
        if line.step == step
        else line
        for line in run.steps
    ]
    return replace(run, steps=tuple(lines))


def test_equal_runs_keep_every_promise() -> None:
    assert verdicts() == []


def test_a_loss_within_the_limit_is_accepted_and_one_beyond_is_not() -> None:
    loss = run().steps[6].loss
    assert verdicts(changed(run(), 7, loss=loss * (1 + 0.9e-6))) == []
    assert verdicts(changed(run(), 7, loss=loss * (1 + 1.1e-6))) == [
        "losses agree to 1e-06 at every step"
    ]
    assert verdicts(changed(run(), 7, loss=float("nan"))) == ["losses agree to 1e-06 at every step"]


def test_a_step_missing_or_made_twice_is_found() -> None:
    whole = run()
    missing = replace(whole, steps=whole.steps[:4] + whole.steps[5:])
    twice = replace(whole, steps=(*whole.steps, whole.steps[4]))
    assert "each step was made exactly once" in verdicts(missing)
    assert verdicts(twice) == ["each step was made exactly once"]
    assert "each step was made exactly once" in verdicts(reference=run(STEPS - 1))


def test_lost_steps_are_found_even_when_they_were_made_again() -> None:
    rounds = resizes()
    rounds[2] = replace(rounds[2], steps_lost=1)
    assert verdicts(rounds=rounds) == ["each step was made exactly once"]


def test_other_samples_and_another_learning_rate_are_found() -> None:
    whole = run()
    other = replace(whole, samples=(*whole.samples[:-1], (STEPS, 1)))
    assert verdicts(other) == ["every batch had the same samples"]
    assert verdicts(changed(whole, 3, lr=1e-9)) == ["every step had the same learning rate"]


def test_another_start_is_found() -> None:
    promise = ["both runs began with the same state"]
    assert verdicts(first={**FIRST, "param/w": 3}) == promise
    assert verdicts(first={"param/w": 1}) == promise


def test_other_degrees_and_a_change_too_few_are_found() -> None:
    rounds = resizes()
    promise = "the degrees are those of the table"
    assert verdicts(rounds=[*rounds[:-1], replace(rounds[-1], after="TP2·PP1·DP1")]) == [promise]
    assert verdicts(rounds=rounds[:-1]) == [promise]


def test_a_restore_that_proves_fewer_tensors_is_found() -> None:
    rounds = resizes()
    rounds[3] = replace(rounds[3], proof=replace(rounds[3].proof, proven=7))
    assert verdicts(rounds=rounds) == ["every restored tensor is the written one"]


def test_an_older_saved_state_is_found() -> None:
    assert verdicts(saved=-1) == ["the last host left the newest state on disk"]


def test_runs_that_wrote_nothing_keep_no_promise_about_steps() -> None:
    nothing = Run((), ())
    assert len(verdicts(nothing, nothing, [], saved=0)) == 6


def test_the_pause_is_the_gap_less_an_ordinary_step() -> None:
    assert pause_s(run(), replace(resizes()[1], step=4)) == pytest.approx(2.0)
    assert pause_s(run(), replace(resizes()[1], step=STEPS)) == 0.0


def test_the_difference_is_relative_to_the_uninterrupted_run() -> None:
    assert difference(2.0, 4.0) == 0.5


def test_a_line_that_is_still_being_written_is_left_out() -> None:
    line = json.dumps({"step": 1, "loss": 5.0, "lr": 0.0, "at": 1.0})
    found = read_run(f'{line}\n{{"step": 2, "lo', '{"step": 1, "samples": 9}\n{"st')
    assert found == Run((Step(1, 5.0, 0.0, 1.0),), ((1, 9),))


def test_what_is_printed_names_every_change_and_every_verdict() -> None:
    rounds = resizes()
    checks = check(run(), run(), rounds, (FIRST, FIRST), STEPS - 1, STORY)
    lines = [change_line(change, r, run()) for change, r in zip(STORY, rounds, strict=True)]
    text = "\n".join([introduction(FRAMEWORKS["megatron"], None), *lines, end_line(run())])
    assert all(change.degrees in text and str(change) in text for change in STORY)
    table = phase_table(run(), rounds, STORY)
    assert all(change.label in table for change in STORY[1:])
    assert [line.split()[0] for line in check_lines(checks).splitlines()] == ["✓"] * 7 + ["✗"]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    reference = changed(run(), 8, loss=run().steps[7].loss * (1 + 1e-8))
    history = History("elastic", tuple(resizes()))
    path = draw(history, run(), reference, tmp_path / "picture.png")
    assert path.read_bytes().startswith(b"\x89PNG")
