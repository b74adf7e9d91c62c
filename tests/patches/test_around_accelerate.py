"""What a loop on Accelerate does beside the training is as it would be without us."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support import training
from support.training.rounds import log, notes, play
from support.training.worker_pool import WorkerPool

pytest.importorskip("accelerate", reason="pip install transformers accelerate")

CONFIG: dict[str, Any] = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto"),
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 1},
    "steps_per_print": 10**9,
}


@pytest.mark.fault
@pytest.mark.parametrize(
    ("samples", "micro_batch"), [(17, 4), pytest.param(45, 2, marks=pytest.mark.campaign)]
)
def test_metrics_are_over_every_sample_of_an_evaluation_set(
    rounds_pool: WorkerPool, tmp_path: Path, samples: int, micro_batch: int
) -> None:
    """Also of one that the ranks do not divide, on any number of ranks; and behind epochs that are
    over, in batches like those of the training."""
    made = play(
        rounds_pool, tmp_path, "accelerates", [(3, 5), (2, 9), (3, None)],
        samples=samples, micro_batch=micro_batch, epochs=4, config=CONFIG,
    )  # fmt: skip
    assert [ranks[0].ending for ranks in made] == ["left", "left", "finished"]
    reported = notes(made)
    assert [line["epoch"] for line in reported] == [0, 0, 1, 0, 1, 2, 3]
    for line in reported:
        assert line["seen"] == list(range(samples)), line
    assert [text for text in log(made[1:]) if text.startswith("event=evaluated_again ")]
    assert "event=replays_otherwise" not in " ".join(log(made))


@pytest.mark.parametrize("device_specific", [True, False])
def test_ranks_that_shuffle_by_different_seeds_are_refused_at_once(
    rounds_pool: WorkerPool, tmp_path: Path, device_specific: bool
) -> None:
    """Each would draw from an order of its own, which a change of ranks alone would show."""
    (ranks,) = play(
        rounds_pool, tmp_path, "accelerates", [(2, None)], seeding=device_specific, config=CONFIG
    )
    for seen in ranks:
        if device_specific:
            assert "loader-0 has seed 5 on rank 0, and others elsewhere: [6]" in seen.ending
        else:
            assert seen.ending == "finished"


@pytest.mark.fault
@pytest.mark.parametrize(
    "kind",
    [
        "epoch",
        "ratio",
        pytest.param("times ranks", marks=pytest.mark.campaign),
        pytest.param("plateau", marks=pytest.mark.campaign),
    ],
)
def test_a_prepared_schedule_is_that_of_the_first_round_on_any_number_of_ranks(
    rounds_pool: WorkerPool, tmp_path: Path, kind: str
) -> None:
    """Stepped by epoch it is not stepped again in epochs that are over; made from the number of
    ranks, it is made from the first round's."""
    given: dict[str, Any] = {"kind": kind, "epochs": 4, "config": CONFIG}
    alone = play(rounds_pool, tmp_path / "alone", "accelerates", [(2, None)], **given)
    made = play(
        rounds_pool, tmp_path / "job", "accelerates", [(2, 7), (1, 13), (2, 20), (1, None)],
        **given,
    )  # fmt: skip
    assert made[-1][0].ending == "finished"
    reported, expected = notes(made), notes(alone)
    assert reported.pop() == {"ranks": 1, "length": 12}  # and behind its first batch, of now
    assert expected.pop() == {"ranks": 2, "length": 6}
    for mine, other in zip(reported, expected, strict=True):
        assert mine == {**other, "rate": pytest.approx(other["rate"], rel=1e-12)}
    assert len({line["rate"] for line in expected}) > 3
    assert "event=replays_otherwise" not in " ".join(log(made))


PLAN = {
    **CONFIG,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(
            ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
        ),
    },
}


@pytest.mark.campaign
def test_a_schedule_of_the_engine_ends_as_the_first_round_planned_it(
    rounds_pool: WorkerPool, tmp_path: Path
) -> None:
    """Accelerate computes how many steps it is for from the number of ranks."""
    given: dict[str, Any] = {"kind": "engine's", "epochs": 2, "config": PLAN}
    alone = play(rounds_pool, tmp_path / "alone", "accelerates", [(2, None)], **given)
    made = play(rounds_pool, tmp_path / "job", "accelerates", [(2, 5), (1, 9), (2, None)], **given)
    assert [ranks[0].ending for ranks in made] == ["left", "left", "finished"]
    reported, expected = (
        {note["step"]: note["rate"] for note in notes(of)} for of in (made, alone)
    )
    assert reported == pytest.approx(expected, rel=1e-12)
    assert len({rate for rate in expected.values()}) > 5


@pytest.mark.fault
@pytest.mark.campaign
@pytest.mark.parametrize("names", ["epochs", "automatic"])
def test_a_saved_state_of_an_epoch_that_is_over_stays(
    rounds_pool: WorkerPool, tmp_path: Path, names: str
) -> None:
    """The engine's part, the schedule's and the RNG states' are of one step. Those that
    Accelerate names itself are counted on."""
    folders = {name: tmp_path / name / "saved" for name in ("alone", "job")}
    for name, rounds in (("alone", [(2, None)]), ("job", [(2, 7), (1, None)])):
        made = play(
            rounds_pool, tmp_path / name, "accelerates", rounds,
            epochs=3, output=str(folders[name]), names=names, kind="every third", config=CONFIG,
        )  # fmt: skip
        assert made[-1][0].ending == "finished"
    kept = [
        {
            str(path.relative_to(folder)): torch.load(path, weights_only=False)["last_epoch"]
            for path in sorted(folder.rglob("scheduler.bin"))
        }
        for folder in (folders["alone"], folders["job"])
    ]
    assert len(kept[0]) == 3
    assert kept[1] == kept[0]


@pytest.mark.campaign
def test_a_state_that_is_saved_under_a_name_twice_is_told_of(
    rounds_pool: WorkerPool, tmp_path: Path
) -> None:
    made = play(
        rounds_pool, tmp_path / "job", "accelerates", [(2, 7), (1, None)],
        epochs=4, output=str(tmp_path / "saved"), names="counted", kind="every third",
        config=CONFIG,
    )  # fmt: skip
    assert made[-1][0].ending == "finished"
    (logged,) = [text for text in log(made) if text.startswith("event=saved_again ")]
    assert "step_3" in logged and "at step 10" in logged and "engine.global_steps" in logged
    assert not [text for text in log(made[:1]) if "saved_again" in text]


@pytest.mark.campaign
def test_a_callback_of_trainers_that_counts_for_itself_is_told_of(
    rounds_pool: WorkerPool, tmp_path: Path
) -> None:
    """Before a change with the line that makes it, and behind one that it began anew."""
    made = play(
        rounds_pool, tmp_path / "job", "calls_back", [(1, 5), (1, None)],
        steps=12, output=str(tmp_path), config=CONFIG,
    )  # fmt: skip
    assert [ranks[0].ending for ranks in made] == ["left", "finished"]
    text = Path(training.__file__).with_name("round_scripts.py").read_text().splitlines()
    (line,) = (n for n, one in enumerate(text, 1) if one.endswith("# line: counting"))
    for part, event in zip(made, ("own_state", "began_anew"), strict=True):
        (logged,) = [text for text in log([part]) if text.startswith(f"event={event} ")]
        assert f"self.n (round_scripts.py:{line})" in logged and "state.global_step" in logged


@pytest.mark.campaign
def test_parameter_groups_that_a_callback_of_trainers_begins_anew_are_those_of_the_state(
    rounds_pool: WorkerPool, tmp_path: Path
) -> None:
    """As the training begins it halves the decay; at each step it sets the betas, which is no
    difference."""
    made = play(
        rounds_pool, tmp_path / "job", "calls_back", [(1, 5), (2, 9), (1, None)],
        steps=12, output=str(tmp_path), config=CONFIG,
    )  # fmt: skip
    assert [ranks[0].ending for ranks in made] == ["left", "left", "finished"]
    reported = notes(made)
    assert {decay for line in reported for decay in line["decays"]} == {0.05, 0.0}
    assert [line["betas"][1] for line in reported] == [1 - 1 / (n + 10) for n in range(12)]
    for part, times in zip(made, (0, 1, 1), strict=True):
        told = [text for text in log([part]) if text.startswith("event=rates ")]
        assert len(told) == times
        assert "event=replays_otherwise" not in " ".join(log([part]))
        assert all("has weight_decay 0.025 before" in text for text in told)


@pytest.mark.campaign
def test_a_loop_without_an_engine_is_told_of(rounds_pool: WorkerPool, tmp_path: Path) -> None:
    ((seen,),) = play(rounds_pool, tmp_path, "has_no_engine", [(1, None)], config=CONFIG)
    assert seen.ending == "finished"
    (logged,) = [text for text in seen.log if text.startswith("event=no_engine ")]
    assert "ACCELERATE_USE_DEEPSPEED" in logged and "--cpu" in logged


def test_a_batch_that_accelerate_takes_from_another_loader_is_refused_with_its_own_way_out(
    rounds_pool: WorkerPool, tmp_path: Path
) -> None:
    """Of all loaders that are prepared together the smallest batch is the engine's micro-batch."""
    ((seen,),) = play(
        rounds_pool, tmp_path, "accelerates", [(1, None)],
        samples=8, micro_batch=1, epochs=1, config=CONFIG,
    )  # fmt: skip
    assert "has batches of 2, the engine of 1" in seen.ending
    assert "smallest batch of the loaders" in seen.ending
    assert "training_data=" not in seen.ending


@pytest.mark.campaign
def test_a_schedule_by_the_ranks_of_now_goes_on_where_the_script_places_its_data(
    rounds_pool: WorkerPool, tmp_path: Path
) -> None:
    """It is told the ranks of each round, and its schedule is stepped by them."""
    given: dict[str, Any] = {"kind": "ratio", "epochs": 5, "config": CONFIG}
    (alone,) = play(rounds_pool, tmp_path / "alone", "accelerates", [(2, None)], **given)
    made = play(
        rounds_pool, tmp_path / "job", "accelerates", [(2, 7), (1, 13), (2, 20)],
        settings={"data_order": "own"}, **given,
    )  # fmt: skip
    assert [ranks[0].ending for ranks in made] == ["left"] * 3
    expected = {line["step"]: line["rate"] for line in notes([alone]) if "step" in line}
    for line in notes(made):
        assert line["rate"] == pytest.approx(expected[line["step"]], rel=1e-12)
