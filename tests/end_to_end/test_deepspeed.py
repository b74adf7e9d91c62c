"""A DeepSpeed script that knows nothing of Scalai changes its ranks: same samples, same losses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.accelerator import ACCELERATOR
from support.agents import Agents
from support.deepspeed_elastic import (
    STEPS,
    arguments,
    check,
    compare,
    config,
    lines_of,
    run_alone,
    train_through,
)

pytestmark = pytest.mark.timeout(600)


def test_a_script_without_a_line_of_ours_goes_through_other_dps_and_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ZeRO stage follows the world as the block says."""
    given = config(0, deepspeed={"zero_stage": {"default": 1, "2": 2}})
    alone = run_alone(tmp_path / "alone", given, "--loader-workers", "0")
    worlds = (3, 1, 2)
    agents = train_through(
        tmp_path / "elastic", given, worlds, monkeypatch, "--loader-workers", "0"
    )
    assert alone.wait(60) == 0
    check(agents, lines_of(tmp_path / "alone"), worlds)
    assert {(line["world"], line["stage"]) for line in agents.lines()} == {(3, 1), (1, 1), (2, 2)}


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_stage_goes_through_four_changes_of_dp(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a stage with DeepSpeed's own loader and its workers; in stage 2 a checkpoint is saved
    at the end of each epoch, and later rounds resume behind it; in stage 3 the model is built in
    shards, on two ranks in stage 1."""
    torchs = ["--loader-workers", "0"]
    saving = [*torchs, "--save", str(tmp_path / "checkpoints")]
    same_order = ["--same-order"] if stage == 2 else []
    flags = {0: [], 2: [*saving, "--resume", *same_order], 3: [*torchs, "--zero-init"]}[stage]
    given = config(stage, deepspeed={"zero_stage": {"2": 1}} if stage == 3 else {})
    alone = run_alone(tmp_path / "alone", given, *same_order)
    worlds = (4, 2, 3, 4)
    agents = train_through(tmp_path / "elastic", given, worlds, monkeypatch, *flags)
    assert alone.wait(60) == 0
    check(agents, lines_of(tmp_path / "alone"), worlds)


@pytest.mark.campaign
def test_a_pipeline_changes_its_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script asks for two stages; the block says on how many ranks there are others. Each
    change is proven to compute the same, and one rank, which does not, is left again.

    No clipping: a pipeline's norm in DeepSpeed depends on its stages.
    """
    degrees = {"default": "pp2", "4": "pp2", "2": "pp2", "3": "pp1", "1": "pp1"}
    always = {"settle_s": 0.2, "prove_function": "always"}
    given = config(1, degrees=degrees, resize=always) | {"steps_per_print": 1}
    del given["gradient_clipping"]
    alone = run_alone(tmp_path / "alone", given, "--num-stages", "1")
    worlds = (4, 2, 3, 4)
    folder, flags = tmp_path / "elastic", ("--num-stages", "2", "--odd-world", "1")
    agents = train_through(folder, given, worlds, monkeypatch, *flags, odd=1)
    assert alone.wait(60) == 0
    check(agents, lines_of(tmp_path / "alone"), worlds, odd=1)
    stages = {(line["world"], line["stages"]) for line in agents.lines()}
    assert stages >= {(4, 2), (2, 2), (3, 1)}
    proven = [each.get("function", "").partition(":")[0] for each in agents.resizes()]
    assert proven[-3:] == ["proven"] * 3, agents.resizes()
    printed = re.findall(r"steps: (\d+) loss", (folder / "a.log").read_text())
    later = max(line["step"] for line in agents.lines() if line["world"] == 1) + 2
    assert [step for step in printed if int(step) >= later] == [*map(str, range(later, STEPS + 1))]


@pytest.mark.campaign
def test_a_script_that_counts_its_steps_makes_none_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the examples of pipelines do. It goes through the steps of earlier rounds again, and sees
    the losses that they had."""
    given = config(1, degrees={"default": "pp2", "1": "pp1"})
    del given["gradient_clipping"]
    alone = run_alone(tmp_path / "alone", given, "--num-stages", "1", "--counts-steps")
    worlds = (2, 1, 2)
    flags = ("--num-stages", "2", "--counts-steps")
    agents = train_through(tmp_path / "elastic", given, worlds, monkeypatch, *flags)
    assert alone.wait(60) == 0
    reported, reference = agents.lines(), lines_of(tmp_path / "alone")
    assert [line["step"] for line in reported].count(1) == len(worlds)
    assert [line["step"] for line in reported[-STEPS:]] == list(range(1, STEPS + 1))
    made: dict[int, Any] = {}
    for line in reported:
        assert line["loss"] == made.setdefault(line["step"], line)["loss"]
    compare(list(made.values()), reference)
    assert {line["world"] for line in made.values()} == set(worlds)
    assert [report.get("steps_lost", 0) for report in agents.resizes()] == [0] * len(worlds)


@pytest.mark.campaign
def test_a_plain_model_that_deepspeed_cuts_changes_its_tp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TP begins as the configuration's autotp_size says."""
    layers = [
        {"patterns": [r".*1\.weight$"], "partition_type": "column"},
        {"patterns": [r".*3\.weight$"], "partition_type": "row"},
    ]
    cuts = {"use_default_specs": False, "layer_specs": layers}
    given = config(1, degrees={"2": "tp1", "2->4": "tp2"})
    alone = run_alone(tmp_path / "alone", given)
    given["train_batch_size"] *= 2  # DeepSpeed counts tensor-parallel ranks as replicas
    given["tensor_parallel"] = {"autotp_size": 2, "partition_config": cuts}
    worlds = (4, 2, 4)
    agents = train_through(tmp_path / "elastic", given, worlds, monkeypatch)
    assert alone.wait(60) == 0
    check(agents, lines_of(tmp_path / "alone"), worlds)
    degrees = [report["after"] for report in agents.resizes()]
    assert degrees == ["TP2·PP1·DP2", "TP1·PP1·DP2", "TP2·PP1·DP2"]


@pytest.mark.campaign
def test_a_checkpoint_that_is_newer_than_the_generation_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker dies, and the only generation is the start: the script's own checkpoint is newer.
    What it brought is carried over the next change."""
    monkeypatch.setenv("DS_ACCELERATOR", ACCELERATOR)
    given = config(1)
    alone = run_alone(tmp_path / "alone", given, "--loader-workers", "0")
    folder = tmp_path / "elastic"
    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps(given))
    flags = ("--step-s", "0.6", "--loader-workers", "0", "--save", str(tmp_path / "checkpoints"))
    script, restarts = arguments(folder, *flags), ("--max-restarts", "3")
    with Agents(folder, None, script, nodes="1", slots=2, flags=restarts) as agents:
        agents.start("a")
        agents.wait_for_step(12)
        agents.kill_worker(1)
        agents.wait_until(lambda: len(agents.resizes()) == 2, "the workers are started again")
        agents.scale(nproc=1)
        agents.wait_for_world(1)
        (folder / "hurry").touch()
        assert agents.exit_code("a") == 0, agents.logs()
    assert alone.wait(60) == 0
    steps = [line["step"] for line in agents.lines()]
    begun_again = next(place for place in range(1, len(steps)) if steps[place] <= steps[place - 1])
    assert steps[begun_again:] == list(range(11, STEPS + 1)), "from the end of the second epoch on"
    compare(agents.lines(), lines_of(tmp_path / "alone"))


@pytest.mark.campaign
def test_stages_between_which_fp16_would_fork_are_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", ACCELERATOR)
    given = {**config(1, deepspeed={"zero_stage": {"1": 0}}), "fp16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(given))
    with Agents(tmp_path, None, arguments(tmp_path), nodes="1", slots=2) as agents:
        agents.start("a")
        assert agents.exit_code("a") != 0
        assert "fp16 with ZeRO stages 0, 1 in one job" in agents.text()
