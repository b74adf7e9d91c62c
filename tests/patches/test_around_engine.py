"""What scripts keep and do beside a DeepSpeed engine is carried, refused or warned of."""

from typing import Any

import numpy as np
import pytest

import scalai
from support.training.rounds import Player, line, notes, told

CAMPAIGN = pytest.mark.campaign


@pytest.mark.fault
@pytest.mark.parametrize(
    ("kind", "is_before", "is_each_step"),
    [("StepLR", True, False), pytest.param("LambdaLR", False, True, marks=CAMPAIGN)],
)
def test_a_schedule_that_the_script_steps_itself_goes_on_where_it_was(
    play: Player, kind: str, is_before: bool, is_each_step: bool
) -> None:
    """Left within an epoch and at its end. Torch's other schedules: ``test_own_schedules``."""
    given: dict[str, Any] = {
        "schedule": kind, "is_before": is_before, "is_each_step": is_each_step, "epochs": 4,
    }  # fmt: skip
    alone = play("trains", [(1, None)], at="alone", **given)
    made = play("trains", [(2, 6), (1, 8), (2, None)], **given)
    reported, expected = ([(of["step"], of["rate"]) for of in notes(m)] for m in (made, alone))
    assert reported == expected and len({rate for _, rate in expected}) > 2
    assert not told(made, "replays_otherwise")


def test_a_batch_that_a_script_computes_by_ranks_stays_that_of_the_first_round(
    play: Player,
) -> None:
    alone = play("trains", [(2, None)], at="alone", per_rank=6, epochs=2)
    made = play("trains", [(2, 1), (1, None)], per_rank=6, epochs=2)
    reported, expected = ([note["loss"] for note in notes(m, "step")] for m in (made, alone))
    assert reported == pytest.approx(expected, rel=1e-6) and len(expected) == 4
    (said,) = told(made, "ranks_then")
    assert "train_batch_size 6" in said and "keeps the 12 samples" in said


@pytest.mark.fault
def test_a_checkpoint_that_is_loaded_behind_steps_is_loaded_in_any_round(play: Player) -> None:
    """The best one at the end; and what is saved behind that is there."""
    output = play.folder
    made = play(
        "keeps_best", [(2, 5), (1, 9), (2, None)],
        epochs=3, output=str(output), best_at=3, back_at=0,
    )  # fmt: skip
    (best,), (at_end,), (loaded,) = (notes(made, of) for of in ("best", "at_end", "loaded"))
    assert loaded["loaded"] == pytest.approx(best["best"], rel=1e-6) and loaded["step"] == 3
    assert at_end["at_end"] != pytest.approx(best["best"], rel=1e-2)
    assert (output / "final").is_dir() and (output / "final.bin").is_file()
    assert [note["step"] for note in notes(made, "drawn")] == list(range(1, 13))
    assert not told(made, "replays_otherwise")


@pytest.mark.fault
@pytest.mark.parametrize(
    ("rounds", "best_at", "back_at"),
    [([(2, 2), (1, None)], 1, 2), pytest.param([(2, 4), (1, None)], 3, 6, marks=CAMPAIGN)],
    ids=["first-round", "later-round"],
)
def test_a_job_that_goes_back_to_a_checkpoint_goes_on_in_its_data(
    play: Player, rounds: list[tuple[int, int | None]], best_at: int, back_at: int
) -> None:
    """Weights and step go back, what is drawn does not; in a change behind that, too."""
    samples: list[list[set[int]]] = []
    for name, played in (("alone", [(2, None)]), ("job", rounds)):
        output = play.folder / f"{name}-saves"
        output.mkdir()
        given = {"epochs": 2, "output": str(output), "best_at": best_at, "back_at": back_at}
        made = play("keeps_best", played, at=name, **given)
        (best,), (back,) = notes(made, "best"), notes(made, "gone_back")
        assert back == {"gone_back": pytest.approx(best["best"], rel=1e-6), "to": best_at}
        samples.append([
            set().union(*(note["drawn"] for note in step))
            for part in made
            for step in zip(*(notes([[seen]], "drawn") for seen in part), strict=True)
        ])  # fmt: skip
    assert samples[1] == samples[0] and len(samples[0]) == 8


@pytest.mark.campaign
def test_each_load_at_the_beginning_is_told_what_it_was_told_in_the_first_round(
    play: Player,
) -> None:
    """Weights of another job, and nothing yet to resume at."""
    made = play("fine_tunes", [(1, 2), (2, None)], output=str(play.folder))
    assert notes(made, "weights") == [{"weights": True, "resumed": False}] * 2
    assert [note["step"] for note in notes(made, "step")] == [1, 2, 3, 4]


@pytest.mark.parametrize("saves", ["step", pytest.param("epoch", marks=CAMPAIGN)])
def test_a_script_that_does_something_else_in_epochs_that_are_over_is_told_the_line(
    play: Player, saves: str
) -> None:
    """As by a metric of the weights of now; and it trains on."""
    is_known = saves == "epoch"
    rounds = [(2, 6), (1, 14), (2, None)] if is_known else [(2, 6), (1, None)]
    made = play("trains", rounds, epochs=4, output=str(play.folder), saves=saves)
    assert [note["step"] for note in notes(made, "step")] == list(range(1, 17))
    assert not told(made[:1], "replays_otherwise")
    said = told(made, "replays_otherwise")
    assert len(said) == (not is_known)
    for logged in said:
        assert f"at={line('best')} " in logged and "behind pass 1 the script has" in logged
        assert "a save of best-#, and had an evaluation then" in logged


@pytest.mark.campaign
@pytest.mark.parametrize("saves", ["score", "step"])
def test_steps_that_a_pipelines_script_goes_through_again_are_compared(
    play: Player, saves: str
) -> None:
    made = play(
        "trains_in_stages", [(1, 5), (2, 9), (1, None)], settings={"stages": [1, 1, 1]},
        steps=12, output=str(play.folder), saves=saves,
    )  # fmt: skip
    assert [note["step"] for note in notes(made[-1:])] == list(range(1, 13))
    said = told(made, "replays_otherwise")
    assert len(said) == (0 if saves == "step" else 2)
    assert all(f"at={line('piped')} " in text and "a save of step-#" in text for text in said)


def test_a_model_is_trained_in_eval_where_the_script_says_so(play: Player) -> None:
    """And what it evaluates is never trained on, also behind epochs that are over."""
    alone = play("trains", [(1, None)], at="alone", epochs=3, in_eval=True)
    made = play("trains", [(1, 6), (2, None)], epochs=3, in_eval=True)
    reported, expected = (
        {note["step"]: note["loss"] for note in notes(of, "step")} for of in (made, alone)
    )
    assert reported == pytest.approx(expected, rel=1e-6) and len(expected) == 12
    for part, whole in zip(made, (9, 5), strict=True):
        assert {note["seen"] for note in notes([part], "seen")} == {whole}


@pytest.mark.fault
def test_what_changes_with_every_step_beside_the_engine_is_named_once(play: Player) -> None:
    """Copies of the weights, metrics, a curriculum, counters, sums: before a change with the line
    that makes them, after it those that count from 0."""
    made = play("keeps_beside", [(2, 6), (1, None)], epochs=3, output=str(play.folder))
    (first,) = told(made, "own_state")
    for name in ("averaged", "average", "accuracy", "curriculum", "total", "done"):
        assert f"{name} ({line(name)})" in first, name
    assert "place" not in first and "engine (" not in first
    (then,) = told(made, "began_anew")
    assert f"done ({line('done')})" in then and "step 9" in then


@pytest.mark.campaign
def test_what_is_done_again_behind_epochs_that_are_over_is_named_once(play: Player) -> None:
    made = play("keeps_beside", [(1, 10), (1, None)], epochs=4, output=str(play.folder))
    for event, place in (("evaluated_again", "evaluated"), ("saved_behind", "saved")):
        (logged,) = told(made, event)
        assert f"at={line(place)} " in logged and "is_replaying" in logged
        assert not told(made[:1], event)


@pytest.mark.campaign
def test_a_copy_of_the_weights_that_is_registered_goes_on(play: Player) -> None:
    given: dict[str, Any] = {"epochs": 3, "output": str(play.folder), "registers": True}
    made = play("keeps_beside", [(2, 6), (1, None)], **given)
    alone = play("keeps_beside", [(1, None)], at="alone", **given)
    reported, expected = ([note["shadow"] for note in notes(of)] for of in (made, alone))
    assert reported == pytest.approx(expected, rel=1e-5) and len(reported) == 12
    assert " average (" not in told(made, "own_state")[0]


@pytest.mark.fault
@pytest.mark.campaign
def test_a_script_that_stops_early_in_epochs_that_are_over_has_not_finished(play: Player) -> None:
    """It evaluates them again, and they do not become better: refused, unless it asks where it
    is."""
    rounds = [(1, 14), (1, None)]
    made = play("trains", rounds, epochs=5, patience=1, fails=True)
    assert made[1][0].ending.startswith("RefusedError") and "step 14" in made[1][0].ending
    asking = play("trains", rounds, at="asking", epochs=5, patience=1, asks=True)
    assert [note["step"] for note in notes(asking)] == list(range(1, 21))


@pytest.mark.campaign
@pytest.mark.parametrize("stage", [1, 2])
def test_a_state_that_is_put_away_between_steps_is_written_where_it_is(
    play: Player, stage: int
) -> None:
    """It lies elsewhere when it is back."""
    given: dict[str, Any] = {
        "epochs": 4, "is_offloaded": True, "config": {"zero_optimization": {"stage": stage}},
    }  # fmt: skip
    alone = play("trains", [(1, None)], at="alone", **given)
    made = play("trains", [(2, 5), (1, None)], **given)
    reported, expected = ([note["loss"] for note in notes(of)] for of in (made, alone))
    assert reported == pytest.approx(expected, rel=1e-6) and len(reported) == 16


SAMPLES, SEED, BATCH = 23, 5, 6
"""Passes end within global batches."""
OWN = {"data_order": "own"}


@pytest.mark.campaign
def test_each_step_draws_its_places_of_the_order_whatever_the_dp(play: Player) -> None:
    given = {"steps": 12, "samples": SAMPLES, "later": SAMPLES}
    made = play("draws_in_order", [(2, 3), (1, 8), (2, None)], settings=OWN, **given)
    order, steps = scalai.Shuffled(SAMPLES, SEED), list[int]()
    for ranks in made:
        for of_ranks in zip(*(seen.notes for seen in ranks), strict=True):
            steps.append(of_ranks[0]["step"])
            places = np.arange(BATCH * (steps[-1] - 1), BATCH * steps[-1])
            drawn = [sample for each in of_ranks for sample in each["drawn"]]
            assert drawn == order.samples_at(places).tolist()
    assert steps == list(range(1, 13))


@pytest.mark.campaign
def test_data_that_changed_between_rounds_is_refused_before_a_step(play: Player) -> None:
    given = {"steps": 4, "samples": SAMPLES, "later": SAMPLES + 1}
    _, (seen,) = play("draws_in_order", [(2, 2), (1, None)], settings=OWN, fails=True, **given)
    assert not seen.notes
    assert seen.ending.startswith("RefusedError: data set 'samples' is another one")
    assert "size=24 (it was 23)" in seen.ending
