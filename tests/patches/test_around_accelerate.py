"""What a loop on Accelerate does beside the training is as it would be without us."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalai.patches.hugging_face.loop_hooks import hook_plugin, put, taken
from support.needed import need
from support.training.rounds import Player, line, notes, told

need("accelerate", "pip install transformers accelerate")

CAMPAIGN = pytest.mark.campaign
COUNTS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
CONFIG: dict[str, Any] = {
    **dict.fromkeys(COUNTS, "auto"), "zero_optimization": {"stage": 1}, "steps_per_print": 10**9,
}  # fmt: skip


@pytest.mark.fault
@pytest.mark.parametrize(("samples", "micro_batch"), [(17, 4), pytest.param(45, 2, marks=CAMPAIGN)])
def test_metrics_are_over_every_sample_of_an_evaluation_set(
    play: Player, samples: int, micro_batch: int
) -> None:
    """Also of one that the ranks do not divide, on any number of ranks; and behind epochs that are
    over, in batches like those of the training."""
    given = {"samples": samples, "micro_batch": micro_batch, "epochs": 4, "config": CONFIG}
    made = play("accelerates", [(3, 5), (2, 9), (3, None)], **given)
    reported = notes(made)
    assert [note["epoch"] for note in reported] == [0, 0, 1, 0, 1, 2, 3]
    for note in reported:
        assert note["seen"] == list(range(samples)), note
    assert told(made[1:], "evaluated_again") and not told(made, "replays_otherwise")


@pytest.mark.parametrize("device_specific", [True, False])
def test_ranks_that_shuffle_by_different_seeds_are_refused_at_once(
    play: Player, device_specific: bool
) -> None:
    """Each would draw from an order of its own, which a change of ranks alone would show."""
    given: dict[str, Any] = {"seeding": device_specific, "config": CONFIG}
    (ranks,) = play("accelerates", [(2, None)], fails=device_specific, **given)
    for seen in ranks if device_specific else ():
        assert "loader-0 has seed 5 on rank 0, and others elsewhere: [6]" in seen.ending


@pytest.mark.fault
@pytest.mark.parametrize(
    "kind",
    ["epoch", "ratio", *(pytest.param(k, marks=CAMPAIGN) for k in ("times ranks", "plateau"))],
)
def test_a_prepared_schedule_is_that_of_the_first_round_on_any_number_of_ranks(
    play: Player, kind: str
) -> None:
    """Stepped by epoch it is not stepped again in epochs that are over; made from the number of
    ranks, it is made from the first round's."""
    given: dict[str, Any] = {"kind": kind, "epochs": 4, "config": CONFIG}
    alone = play("accelerates", [(2, None)], at="alone", **given)
    made = play("accelerates", [(2, 7), (1, 13), (2, 20), (1, None)], **given)
    reported, expected = notes(made), notes(alone)
    assert reported.pop() == {"ranks": 1, "length": 12}  # and behind its first batch, of now
    assert expected.pop() == {"ranks": 2, "length": 6}
    for mine, other in zip(reported, expected, strict=True):
        assert mine == {**other, "rate": pytest.approx(other["rate"], rel=1e-12)}
    assert len({note["rate"] for note in expected}) > 3
    assert not told(made, "replays_otherwise")


PLANNED = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
PLAN = {
    **CONFIG,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(PLANNED, "auto")},
}


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("given", "rounds", "settings"),
    [
        ({"kind": "engine's", "epochs": 2, "config": PLAN}, [(2, 5), (1, 9), (2, None)], {}),
        (
            {"kind": "ratio", "epochs": 5, "config": CONFIG}, [(2, 7), (1, 13), (2, 20)],
            {"data_order": "own"},
        ),
    ],
    ids=["the engine's, of steps that Accelerate computes", "by the ranks of now"],
)  # fmt: skip
def test_a_schedule_ends_as_the_first_round_planned_it(
    play: Player, given: dict[str, Any], rounds: list[Any], settings: dict[str, str]
) -> None:
    """Where the script places its data itself it is told the ranks of each round."""
    alone = play("accelerates", [(2, None)], at="alone", **given)
    made = play("accelerates", rounds, settings=settings, **given)
    reported, expected = (
        {note["step"]: note["rate"] for note in notes(of, "step")} for of in (made, alone)
    )
    assert reported == pytest.approx({step: expected[step] for step in reported}, rel=1e-12)
    assert len(reported) >= 12 and len(set(expected.values())) > 5


@pytest.mark.fault
@pytest.mark.campaign
@pytest.mark.parametrize("names", ["epochs", "automatic"])
def test_a_saved_state_of_an_epoch_that_is_over_stays(play: Player, names: str) -> None:
    """The engine's part, the schedule's and the RNG states' are of one step. Those that
    Accelerate names itself are counted on."""
    kept = []
    for name, rounds in (("alone", [(2, None)]), ("job", [(2, 7), (1, None)])):
        folder = play.folder / f"{name}-saves"
        given = {"epochs": 3, "output": str(folder), "names": names, "config": CONFIG}
        play("accelerates", rounds, at=name, kind="every third", **given)
        kept.append({
            str(path.relative_to(folder)): torch.load(path, weights_only=False)["last_epoch"]
            for path in folder.rglob("scheduler.bin")
        })  # fmt: skip
    assert kept[1] == kept[0] and len(kept[0]) == 3


@pytest.mark.campaign
def test_a_state_that_is_saved_under_a_name_twice_is_told_of(play: Player) -> None:
    given = {"output": str(play.folder / "saved"), "names": "counted", "kind": "every third"}
    made = play("accelerates", [(2, 7), (1, None)], epochs=4, config=CONFIG, **given)
    (logged,) = told(made, "saved_again")
    assert "step_3" in logged and "at step 10" in logged and "engine.global_steps" in logged
    assert not told(made[:1], "saved_again")


@pytest.mark.campaign
def test_what_a_callback_of_trainers_counts_or_sets_is_told_of(play: Player) -> None:
    """A count of its own before a change with the line that makes it, and behind one that it began
    anew. As the training begins it halves the decay; at each step it sets the betas, which is no
    difference."""
    given: dict[str, Any] = {"steps": 12, "output": str(play.folder), "config": CONFIG}
    made = play("calls_back", [(1, 5), (2, 9), (1, None)], **given)
    reported = notes(made, "n")
    assert {decay for note in reported for decay in note["decays"]} == {0.05, 0.0}
    assert [note["betas"][1] for note in reported] == [1 - 1 / (n + 10) for n in range(12)]
    events = ("own_state", "began_anew", "began_anew")
    for part, event, times in zip(made, events, (0, 1, 1), strict=True):
        (logged,) = told([part], event)
        assert f"self.n ({line('counting')})" in logged and "state.global_step" in logged
        rates = told([part], "rates")
        assert len(rates) == times and not told([part], "replays_otherwise")
        assert all("has weight_decay 0.025 before" in text for text in rates)


def test_trainer_goes_on_in_its_epoch_and_evaluates_at_the_start_once(play: Player) -> None:
    given: dict[str, Any] = {
        "steps": 8, "output": str(play.folder), "config": CONFIG, "logging_steps": 1,
        "ignore_data_skip": True, "eval_on_start": True,
    }  # fmt: skip
    alone = play("calls_back", [(1, None)], at="alone", **given)
    made = play("calls_back", [(1, 5), (2, None)], **given)
    reported, expected = ([n["logged"] for n in notes(m, "logged")] for m in (made, alone))
    assert reported == pytest.approx(expected, abs=2e-4) and len(expected) == 8
    assert notes(made, "evaluated") == [{"evaluated": 0}]
    assert not told(made, "replays_otherwise")


def test_a_batch_that_accelerate_takes_from_another_loader_is_refused_with_its_own_way_out(
    play: Player,
) -> None:
    """Of all loaders that are prepared together the smallest batch is the engine's micro-batch."""
    given = {"samples": 8, "micro_batch": 1, "epochs": 1, "config": CONFIG}
    ((seen,),) = play("accelerates", [(1, None)], fails=True, **given)
    assert "has batches of 2, the engine of 1" in seen.ending
    assert "smallest batch of the loaders" in seen.ending
    assert "training_data=" not in seen.ending


OURS = {"store": {"snapshot_every": "auto"}, "resize": {"standby": "auto"}}


def test_our_block_is_passed_over_by_accelerate_and_nothing_else() -> None:
    """Without the hook it takes values that are ``auto`` for its own."""
    plain = {**dict.fromkeys(COUNTS, 1), "zero_optimization": {"stage": 1}, "scalai": OURS}
    import accelerate.utils.dataclasses as dataclasses

    unhooked = dataclasses.DeepSpeedPlugin(hf_ds_config=plain)
    with pytest.raises(ValueError, match=r"scalai\.store\.snapshot_every"):
        unhooked.deepspeed_config_process(must_match=False)
    own: Any = type("Plugin", (dataclasses.DeepSpeedPlugin,), {})
    own.fill_match = dataclasses.DeepSpeedPlugin.fill_match
    hook_plugin(SimpleNamespace(DeepSpeedPlugin=own))
    plugin = own(hf_ds_config={**plain, "train_batch_size": "auto"})
    plugin.deepspeed_config_process(must_match=False, train_batch_size=4)
    found = plugin.deepspeed_config
    assert found["train_batch_size"] == 4 and found["scalai"] == OURS
    other = own(hf_ds_config={**plain, "bf16": {"enabled": "auto"}})
    with pytest.raises(ValueError, match=r"bf16\.enabled"):
        other.deepspeed_config_process(must_match=False)


STEPS = 4096


class Wrapper:
    """Accelerate's wrapper, as far as a schedule is carried: made for ranks, and stepped by so
    many."""

    def __init__(self, ranks: int, steps: int = 0) -> None:
        self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda at: 1 - at / (STEPS * ranks)
        )
        self.step(steps)

    def step(self, times: int) -> None:
        for _ in range(times):
            self.optimizer.step()
            self.scheduler.step()

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


def test_a_prepared_schedule_goes_on_where_it_was() -> None:
    before, after = Wrapper(8, steps=10), Wrapper(8)
    assert put(taken(before, 2), after) is None
    assert after.rate == before.rate
    after.step(2)
    assert after.rate == pytest.approx(1 - 12 / (STEPS * 8))


@pytest.mark.parametrize("follows", [True, False])
def test_a_script_that_is_told_the_ranks_of_now_has_its_schedule_stepped_as_it_made_it(
    follows: bool,
) -> None:
    """In units of these ranks, or of the first ones whatever the ranks."""
    now = 4 if follows else 2
    before, after = Wrapper(2, steps=10), Wrapper(now)
    assert put(taken(before, 2), after, told=4) == (now, follows)
    assert after.rate == 1 - 5 / STEPS
    after.step(now)
    assert after.rate == pytest.approx(1 - 6 / STEPS)
