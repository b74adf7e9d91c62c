"""What scripts keep and do beside a DeepSpeed engine is carried, refused or warned of."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.training import rounds
from support.training.rounds import Seen, log, notes, play
from support.training.worker_pool import WorkerPool

CAMPAIGN = pytest.mark.campaign
SCHEDULES = [
    ("StepLR", True, False),
    pytest.param("LambdaLR", False, True, marks=pytest.mark.campaign),
    pytest.param("OneCycleLR", True, True, marks=pytest.mark.campaign),
    pytest.param("SequentialLR", False, True, marks=pytest.mark.campaign),
    pytest.param("ReduceLROnPlateau", False, False, marks=pytest.mark.campaign),
]


@pytest.mark.fault
@pytest.mark.parametrize(("kind", "is_before", "is_each_step"), SCHEDULES)
def test_a_schedule_that_the_script_steps_itself_goes_on_where_it_was(
    rounds_pool: WorkerPool, tmp_path: Path, kind: str, is_before: bool, is_each_step: bool
) -> None:
    """Made before the engine or behind it, stepped each epoch or each step; left within an epoch
    and at its end."""
    given: dict[str, Any] = {
        "kind": kind,
        "is_before": is_before,
        "is_each_step": is_each_step,
        "epochs": 4,
    }
    (alone,) = play(rounds_pool, tmp_path / "alone", "keeps_schedule", [(1, None)], **given)
    rounds = [(2, 6), (1, 8), (2, None)]
    made = play(rounds_pool, tmp_path / "job", "keeps_schedule", rounds, **given)
    assert [ranks[0].ending for ranks in made] == ["left", "left", "finished"]
    expected = notes([alone])
    assert len({line["rate"] for line in expected}) > 2
    assert not warned(made, "replays_otherwise")
    assert notes(made) == expected


@pytest.mark.fault
def test_a_checkpoint_that_is_loaded_behind_steps_is_loaded_in_any_round(
    rounds_pool: WorkerPool, tmp_path: Path
) -> None:
    """The best one at the end; and what is saved behind that is there."""
    given: dict[str, Any] = {"epochs": 3, "output": str(tmp_path), "best_at": 3, "back_at": 0}
    made = play(rounds_pool, tmp_path / "job", "keeps_best", [(2, 5), (1, 9), (2, None)], **given)
    assert [ranks[0].ending for ranks in made] == ["left", "left", "finished"]
    reported = notes(made)
    best = next(line["best"] for line in reported if "best" in line)
    loaded = next(line for line in reported if "loaded" in line)
    assert loaded["loaded"] == pytest.approx(best, rel=1e-6) and loaded["step"] == 3
    at_end = next(line["at_end"] for line in reported if "at_end" in line)
    assert at_end != pytest.approx(best, rel=1e-2)
    assert (tmp_path / "final").is_dir() and (tmp_path / "final.bin").is_file()
    assert [line["step"] for line in reported if "drawn" in line] == list(range(1, 13))
    assert not warned(made, "replays_otherwise")


@pytest.mark.parametrize(
    "is_known", [False, pytest.param(True, marks=CAMPAIGN)], ids=["otherwise", "as before"]
)
def test_a_script_that_does_something_else_in_epochs_that_are_over_is_told_the_line(
    rounds_pool: WorkerPool, tmp_path: Path, is_known: bool
) -> None:
    """As by a metric of the weights of now; and it trains on."""
    given: dict[str, Any] = {"epochs": 4, "output": str(tmp_path), "is_known": is_known}
    rounds = [(2, 6), (1, 14), (2, None)] if is_known else [(2, 6), (1, None)]
    made = play(rounds_pool, tmp_path / "job", "saves_by_steps", rounds, **given)
    assert made[-1][0].ending == "finished"
    assert [line["step"] for line in notes(made) if "step" in line] == list(range(1, 17))
    said = [warned([part], "replays_otherwise") for part in made]
    assert [len(lines) for lines in said] == ([0, 0, 0] if is_known else [0, 1])
    for (logged,) in said[1:] if not is_known else ():
        assert f"at={line('best')} " in logged and "behind pass 1 the script has" in logged
        assert "a save of best-#, and had an evaluation then" in logged


@pytest.mark.campaign
@pytest.mark.parametrize("is_known", [False, True], ids=["otherwise", "as before"])
def test_steps_that_a_pipelines_script_goes_through_again_are_compared(
    rounds_pool: WorkerPool, tmp_path: Path, is_known: bool
) -> None:
    given: dict[str, Any] = {"steps": 12, "output": str(tmp_path), "is_known": is_known}
    rounds = [(1, 5), (2, 9), (1, None)]
    made = play(rounds_pool, tmp_path / "job", "counts_pipeline_steps", rounds, **given)
    assert [ranks[0].ending for ranks in made] == ["left", "left", "finished"]
    assert [line["step"] for line in notes(made[-1:])] == list(range(12))
    (told,) = ([text for text in log(made) if text.startswith("event=replays_otherwise ")],)
    assert len(told) == (0 if is_known else 2)
    assert all(f"at={line('piped')} " in text and "a save of step-#" in text for text in told)


def test_a_model_is_trained_in_eval_where_the_script_says_so(
    rounds_pool: WorkerPool, tmp_path: Path
) -> None:
    """And what it evaluates is never trained on, also behind epochs that are over."""
    (alone,) = play(rounds_pool, tmp_path / "alone", "trains", [(1, None)], epochs=3, in_eval=True)
    rounds = [(1, 6), (2, None)]
    made = play(rounds_pool, tmp_path / "job", "trains", rounds, epochs=3, in_eval=True)
    assert [ranks[0].ending for ranks in made] == ["left", "finished"]
    reported, expected = (
        {line["step"]: line["loss"] for line in notes(of) if "step" in line}
        for of in (made, [alone])
    )
    assert reported == pytest.approx(expected, rel=1e-6) and len(expected) == 12
    for part, whole in zip(made, (9, 5), strict=True):
        assert {line["seen"] for line in notes([part]) if "seen" in line} == {whole}


@pytest.mark.campaign
def test_each_load_at_the_beginning_is_told_what_it_was_told_in_the_first_round(
    rounds_pool: WorkerPool, tmp_path: Path
) -> None:
    """Weights of another job, and nothing yet to resume at."""
    given: dict[str, Any] = {"output": str(tmp_path)}
    made = play(rounds_pool, tmp_path / "job", "fine_tunes", [(1, 2), (2, None)], **given)
    assert made[-1][0].ending == "finished"
    reported = notes(made)
    assert [line for line in reported if "weights" in line] == [
        {"weights": True, "resumed": False}
    ] * 2
    assert [line["step"] for line in reported if "step" in line] == [1, 2, 3, 4]


@pytest.mark.fault
@pytest.mark.parametrize(
    ("rounds", "best_at", "back_at"),
    [([(2, 2), (1, None)], 1, 2), pytest.param([(2, 4), (1, 8), (2, None)], 3, 6, marks=CAMPAIGN)],
    ids=["first-round", "later-round"],
)
def test_a_job_that_goes_back_to_a_checkpoint_goes_on_in_its_data(
    rounds_pool: WorkerPool,
    tmp_path: Path,
    rounds: list[tuple[int, int | None]],
    best_at: int,
    back_at: int,
) -> None:
    """Weights and step go back, what is drawn does not; in a change behind that, too."""
    samples: list[list[set[int]]] = []
    for name, played in (("alone", [(2, None)]), ("job", rounds)):
        (tmp_path / name).mkdir()
        given: dict[str, Any] = {
            "epochs": 2, "output": str(tmp_path / name), "best_at": best_at, "back_at": back_at,
        }  # fmt: skip
        made = play(rounds_pool, tmp_path / name / "state", "keeps_best", played, **given)
        assert made[-1][0].ending == "finished"
        reported = notes(made)
        best = next(line["best"] for line in reported if "best" in line)
        back = next(line for line in reported if "gone_back" in line)
        assert back == {"gone_back": pytest.approx(best, rel=1e-6), "to": best_at}
        samples.append([
            set().union(*(ranks["drawn"] for ranks in step))
            for part in made
            for step in zip(*(_drawn(seen) for seen in part), strict=True)
        ])  # fmt: skip
    assert samples[1] == samples[0] and len(samples[0]) == 8


@pytest.mark.campaign
def test_a_schedule_that_cannot_be_carried_is_refused_before_the_first_step(
    rounds_pool: WorkerPool, tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "kind": "none of ours",
        "is_before": True,
        "is_each_step": True,
        "epochs": 1,
    }
    ((seen,),) = play(rounds_pool, tmp_path, "keeps_schedule", [(1, None)], **given)
    assert seen.ending.startswith("RefusedError") and "LambdaLR's" in seen.ending
    assert not seen.notes


@pytest.mark.fault
@pytest.mark.campaign
def test_another_batch_on_the_way_is_refused(rounds_pool: WorkerPool, tmp_path: Path) -> None:
    ((seen,),) = play(rounds_pool, tmp_path, "trains", [(1, None)], resized_to=12)
    assert seen.ending.startswith("RefusedError") and "set_train_batch_size(12)" in seen.ending
    assert not log([[seen]]) or len(notes([[seen]])) == 2


def _drawn(seen: Seen) -> list[dict[str, Any]]:
    return [line for line in seen.notes if "drawn" in line]


def line(of: str) -> str:
    """Return where ``round_scripts`` has a comment that marks a line."""
    lines = Path(rounds.__file__).with_name("round_scripts.py").read_text().splitlines()
    (number,) = (n for n, text in enumerate(lines, 1) if text.endswith(f"# line: {of}"))
    return f"round_scripts.py:{number}"


def warned(made: Sequence[Sequence[Seen]], event: str) -> list[str]:
    return [text for text in log(made) if text.startswith(f"event={event} ")]


@pytest.mark.fault
def test_what_changes_with_every_step_beside_the_engine_is_named_once(
    rounds_pool: WorkerPool, tmp_path: Path
) -> None:
    """Copies of the weights, metrics, a curriculum, counters, sums: before a change with the line
    that makes them, after it those that count from 0."""
    given: dict[str, Any] = {"epochs": 3, "output": str(tmp_path)}
    made = play(rounds_pool, tmp_path / "job", "keeps_beside", [(2, 6), (1, None)], **given)
    assert [ranks[0].ending for ranks in made] == ["left", "finished"]
    (first,) = warned(made, "own_state")
    for name in ("averaged", "average", "accuracy", "curriculum", "total", "done"):
        assert f"{name} ({line(name)})" in first, name
    assert "place" not in first and "engine (" not in first
    (then,) = warned(made, "began_anew")
    assert f"done ({line('done')})" in then and "step 9" in then


@pytest.mark.campaign
def test_what_is_done_again_behind_epochs_that_are_over_is_named_once(
    rounds_pool: WorkerPool, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"epochs": 4, "output": str(tmp_path)}
    made = play(rounds_pool, tmp_path / "job", "keeps_beside", [(1, 10), (1, None)], **given)
    assert [ranks[0].ending for ranks in made] == ["left", "finished"]
    for event, place in (("evaluated_again", "evaluated"), ("saved_behind", "saved")):
        (logged,) = warned(made, event)
        assert f"at={line(place)} " in logged and "is_replaying" in logged
        assert not warned(made[:1], event)


@pytest.mark.campaign
def test_a_copy_of_the_weights_that_is_registered_goes_on(
    rounds_pool: WorkerPool, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"epochs": 3, "output": str(tmp_path), "registers": True}
    rounds = [(2, 6), (1, None)]
    made = play(rounds_pool, tmp_path / "job", "keeps_beside", rounds, **given)
    alone = play(rounds_pool, tmp_path / "alone", "keeps_beside", [(1, None)], **given)
    reported, expected = ([note["shadow"] for note in notes(of)] for of in (made, alone))
    assert reported == pytest.approx(expected, rel=1e-5) and len(reported) == 12
    assert " average (" not in warned(made, "own_state")[0]


@pytest.mark.campaign
def test_a_loop_that_counts_its_own_steps_hears_that_it_goes_beyond_its_plan(
    rounds_pool: WorkerPool, tmp_path: Path
) -> None:
    """It is over after so many steps of its own, in each round."""
    made = play(rounds_pool, tmp_path, "counts_its_steps", [(2, 6), (1, None)], steps=10)
    assert [ranks[0].ending for ranks in made] == ["left", "finished"]
    assert notes(made)[-1] == {"step": 11, "number": 9}
    (anew,), (beyond,) = warned(made, "began_anew"), warned(made, "beyond_plan")
    assert f"number ({line('number')})" in anew
    assert "made for 10 steps" in beyond and "engine.global_steps" in beyond


@pytest.mark.fault
@pytest.mark.campaign
def test_a_script_that_stops_early_in_epochs_that_are_over_has_not_finished(
    rounds_pool: WorkerPool, tmp_path: Path
) -> None:
    """It evaluates them again, and they do not become better: refused, unless it asks where it
    is."""
    rounds: list[tuple[int, int | None]] = [(1, 14), (1, None)]
    given: dict[str, Any] = {"epochs": 5, "patience": 1}
    made = play(rounds_pool, tmp_path / "job", "stops_early", rounds, asks=False, **given)
    assert made[1][0].ending.startswith("RefusedError") and "step 14" in made[1][0].ending
    asking = play(rounds_pool, tmp_path / "asking", "stops_early", rounds, asks=True, **given)
    assert asking[1][0].ending == "finished"
    assert [note["step"] for note in notes(asking)] == list(range(1, 21))


@pytest.mark.campaign
@pytest.mark.parametrize("stage", [1, 2])
def test_a_state_that_is_put_away_between_steps_is_written_where_it_is(
    rounds_pool: WorkerPool, tmp_path: Path, stage: int
) -> None:
    """It lies elsewhere when it is back."""
    config = {"zero_optimization": {"stage": stage}}
    given: dict[str, Any] = {"epochs": 4, "is_offloaded": True, "config": config}
    alone = play(rounds_pool, tmp_path / "alone", "trains", [(1, None)], **given)
    rounds = [(2, 5), (1, None)]
    made = play(rounds_pool, tmp_path / "job", "trains", rounds, **given)
    assert [ranks[0].ending for ranks in made] == ["left", "finished"]
    reported, expected = ([note["loss"] for note in notes(of)] for of in (made, alone))
    assert reported == pytest.approx(expected, rel=1e-6) and len(reported) == 16


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"sequence_parallel_size": 2}, "sequence_parallel_size = 2 (Ulysses)"),
        (
            {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}},
            "curriculum_learning",
        ),
    ],
)
def test_what_fixes_ranks_is_refused_before_an_engine_is_built(
    rounds_pool: WorkerPool, tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    ((seen, _),) = play(rounds_pool, tmp_path, "trains", [(2, None)], config=config)
    assert seen.ending.startswith("RefusedError") and named in seen.ending
