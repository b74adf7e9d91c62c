"""A DeepSpeed script that knows nothing of Scalai changes its ranks, and workers die on the way:
same samples, same losses. Common jobs run with a release of every minor version that is known.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.accelerator import ACCELERATOR
from support.agents import Agents
from support.deepspeed_elastic import (
    AUTOTP_CUTS,
    STEPS,
    STEPS_PER_EPOCH,
    arguments,
    check,
    compare,
    config,
    lines_of,
    run_alone,
    train_through,
)
from support.deepspeed_releases import installed

pytestmark = pytest.mark.timeout(600)


def test_a_script_without_a_line_of_ours_goes_through_other_dps_and_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ZeRO stage follows the world as the block says. Three replicas do not divide the
    batch."""
    stages = {"zero_stage": {"default": 1, "2": 2}}
    given = config(0, batch=10, micro=2, deepspeed=stages)
    alone = run_alone(tmp_path / "alone", given, "--loader-workers", "0")
    worlds = (3, 1, 2)
    agents = train_through(
        tmp_path / "elastic", given, worlds, monkeypatch, "--loader-workers", "0"
    )
    assert alone.wait(60) == 0
    check(agents, lines_of(tmp_path / "alone"), worlds)
    seen = {(line["world"], line["stage"], line["passes"]) for line in agents.lines()}
    assert seen == {(3, 1, 6), (1, 1, 5), (2, 2, 10)}


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.parametrize(
    ("stage", "models", "spilled"),
    [(2, "4", [True, False]), (3, "1.8", [True, True])],
    ids=["optimizer", "parameters"],
)
def test_a_job_that_fits_in_no_other_way_goes_on_in_host_memory_and_comes_back(
    stage: int, models: str, spilled: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device has memory for so many models. In stage 2 three ranks keep 3 each, and one would
    keep 5, or 2 without the optimizer; in stage 3 a third of 5 each, and one 5, 2, or 1."""
    given = config(stage)
    alone = run_alone(tmp_path / "alone", given, "--loader-workers", "0")
    worlds = (3, 1, 3)
    flags = ["--loader-workers", "0", "--device-models", models] + ["--zero-init"] * (stage == 3)
    agents = train_through(tmp_path / "elastic", given, worlds, monkeypatch, *flags)
    assert alone.wait(60) == 0
    check(agents, lines_of(tmp_path / "alone"), worlds)
    for line in agents.lines():
        assert line["is_spilled"] == (spilled if line["world"] == 1 else [False, False])
    logs, name = agents.text(), "parameters" if spilled[1] else "optimizer"
    assert f"offload none -> {name}, the next candidate after an out-of-memory" in logs
    assert f"offload {name} -> none" in logs and f", offload {name}; paused" in logs


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
@pytest.mark.turns
def test_a_pipeline_changes_its_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script asks for two stages; the block says on how many ranks there are others, which may
    be uneven. Each change is proven to compute the same, and one rank, which does not, is left
    again.

    No clipping: a pipeline's norm in DeepSpeed depends on its stages.
    """
    degrees = {"default": "pp2", "4": "pp2", "2": "pp2", "3": "pp3", "1": "pp1"}
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
    assert stages >= {(4, 2), (2, 2), (3, 3)}
    proven = [each.get("function", "").partition(":")[0] for each in agents.resizes()]
    assert proven[-3:] == ["proven"] * 3, agents.resizes()
    printed = re.findall(r"steps: (\d+) loss", (folder / "a.log").read_text())
    later = max(line["step"] for line in agents.lines() if line["world"] == 1) + 2
    assert [step for step in printed if int(step) >= later] == [*map(str, range(later, STEPS + 1))]


@pytest.mark.campaign
@pytest.mark.turns
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
@pytest.mark.turns
def test_a_plain_model_that_deepspeed_cuts_changes_its_tp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TP begins as the configuration's autotp_size says."""
    given = config(1, degrees={"2": "tp1", "2->4": "tp2"})
    alone = run_alone(tmp_path / "alone", given)
    given["train_batch_size"] *= 2  # DeepSpeed counts tensor-parallel ranks as replicas
    given["tensor_parallel"] = {"autotp_size": 2, "partition_config": AUTOTP_CUTS}
    worlds = (4, 2, 4)
    agents = train_through(tmp_path / "elastic", given, worlds, monkeypatch)
    assert alone.wait(60) == 0
    check(agents, lines_of(tmp_path / "alone"), worlds)
    degrees = [report["after"] for report in agents.resizes()]
    assert degrees == ["TP2·PP1·DP2", "TP1·PP1·DP2", "TP2·PP1·DP2"]


@pytest.mark.campaign
@pytest.mark.turns
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
@pytest.mark.turns
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


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.parametrize(
    ("stage", "flags"), [(0, ()), (1, ()), (3, ("--zero-init",))], ids=["0", "1", "zero.Init"]
)
def test_next_workers_at_the_brink_go_on_as_if_nothing_had_happened(
    stage: int, flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run the script as far as the engine, or a model in shards, and build that once the old
    workers are gone. A host that joins has nobody yet, and room for two models; its workers wait
    for those of the other."""
    monkeypatch.setenv("DS_ACCELERATOR", ACCELERATOR)
    given = config(stage, resize={"settle_s": 0.2, "standby": "brink"})
    flags = ("--loader-workers", "0", *flags)
    alone = run_alone(tmp_path / "alone", given, *flags)
    folder = tmp_path / "elastic"
    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps(given))
    with Agents(folder, None, arguments(folder, "--step-s", "0.6", *flags)) as agents:
        agents.start("a")
        agents.wait_for_all(2)
        agents.start("b", "--nproc-per-node", "1")
        agents.wait_for_all(3)
        agents.drain("b")
        agents.wait_for_all(2)
        (folder / "hurry").touch()
        assert agents.exit_code("a") == 0, agents.logs()
        text = agents.text()
    assert alone.wait(60) == 0
    check(agents, lines_of(tmp_path / "alone"), (2, 3, 2))
    levels = re.findall(r"event=standby host=(\w) \S+ level=(\w+)", text)
    assert sorted(levels) == [("a", "brink"), ("a", "brink"), ("b", "models")]
    order = re.findall(r"event=(build '|round '|hook framework)", (folder / "a.log").read_text())
    later = ["build '", "round '", "hook framework"]
    assert order == [*later[1:], *later, *later], "engines are built in their round"


EPOCHS = 60
THREE_TO_ONE = (3, 2, 1)
STAGES = {"0.16.9": (2, 3, 1), "0.17.6": (1, 3, 0), "0.18.9": (2, 3, 1)}
"""Stage 2 of 0.17.6 loses gradients, and is refused."""
PLACES = ("drain", "write", "written", "commit", "relaunch", "plan", "move", "restore", "leave")
"""Where a worker may die in a change."""


@contextlib.contextmanager
def training(
    folder: Path, stage: int, monkeypatch: pytest.MonkeyPatch, standby: str = "auto"
) -> Iterator[Agents]:
    """Give a job that may lose anybody. Then it trains to its end, and each of its steps, however
    often it was made, must be that of the uninterrupted run."""
    monkeypatch.setenv("DS_ACCELERATOR", ACCELERATOR)
    resize = {"settle_s": 0.2, "standby": standby}
    given = config(stage, store={"snapshot_every": 5}, resize=resize)
    flags = ("--loader-workers", "0", "--epochs", str(EPOCHS))
    alone = run_alone(folder / "alone", given, *flags)
    elastic = folder / "elastic"
    elastic.mkdir()
    (elastic / "ds.json").write_text(json.dumps(given))
    script = arguments(elastic, "--step-s", "0.6", *flags)
    restarts = ("--max-restarts", "100")
    # The same hosts die again and again.
    again = {"resize.quarantine_s": 0.0, "resize.build_timeout_s": 30.0}
    with Agents(elastic, None, script, nodes="1", flags=restarts, constants=again) as agents:
        agents.start("a")
        yield agents
        (elastic / "hurry").touch()
        assert agents.exit_code("a") == 0, agents.logs()
    assert alone.wait(60) == 0
    made = agents.lines()
    assert {line["step"] for line in made} == set(range(1, STEPS_PER_EPOCH * EPOCHS + 1))
    compare(made, lines_of(folder / "alone"))


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.parametrize("stage", [0, 3])
def test_a_worker_may_die_at_every_place_of_a_change(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a stage the other ranks have all that the dead one had, and no step is lost. Where
    state is in shards, what dies before it is written is gone, and the newest snapshot counts."""
    with training(tmp_path, stage, monkeypatch) as agents:
        world = 2
        for number, place in enumerate(PLACES):
            agents.wait_for_all(world)
            changes, world = len(agents.resizes()), 1 + number % 2
            agents.arm(place, "0")
            agents.scale(nproc=world)
            agents.wait_for_death()
            agents.wait_until(lambda: len(agents.resizes()) > changes, f"steps after {place}")  # noqa: B023
            agents.wait_for_world(world)
            lost = agents.resizes()[-1].get("steps_lost", 0)
            may_lose = place in PLACES[:3] and (stage > 0 or world == 2)
            assert lost == 0 or may_lose, f"{place}: {lost}\n{agents.logs()}"


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.fault
def test_a_worker_of_a_change_by_the_brink_may_die_or_hang_at_any_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the brink (``build``) that costs the running job nothing, and behind it no step: the old
    state is whole until the new one is proven."""
    kill, hang = "SIGKILL", "SIGSTOP"
    places = (("build", kill), ("build", hang), ("write", kill), ("relaunch", kill))
    with training(tmp_path, 0, monkeypatch, standby="brink") as agents:
        agents.wait_for_all(2)
        agents.wait_until(lambda: "event=warm" in agents.text(), "workers can be forked")
        for number, (place, name) in enumerate((*places, ("restore", kill))):
            levels, changes = agents.text().count("level=brink"), len(agents.resizes())
            agents.arm(place, "0", name)
            agents.scale(nproc=1 + number % 2)
            agents.wait_for_death()
            agents.wait_for_all(1 + number % 2)
            agents.wait_until(lambda: len(agents.resizes()) > changes, f"steps after {place}")  # noqa: B023
            assert agents.text().count("level=brink") > levels, place
            lost = [report.get("steps_lost", 0) for report in agents.resizes()]
            assert not any(lost), f"{place}: {lost}\n{agents.logs()}"


@pytest.mark.campaign
@pytest.mark.fault
@pytest.mark.turns
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_failure_in_training_costs_no_step_where_the_state_lives_on(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank raises, and what it holds is written by its own process; without a stage it may as
    well be killed."""
    with training(tmp_path, stage, monkeypatch) as agents:
        agents.wait_for_step(3, world=2)
        for number in range(2):
            agents.wait_for_all(2)
            changes, step = len(agents.resizes()), agents.lines()[-1]["step"]
            agents.wait_until(lambda: agents.lines()[-1]["step"] > step, "a step of this round")  # noqa: B023
            if stage == 0 and number:
                agents.kill_worker(1)
            else:
                (tmp_path / "elastic" / f"raise-{number}").touch()
            agents.wait_until(lambda: len(agents.resizes()) > changes, "steps after the failure")  # noqa: B023
            lost = [report.get("steps_lost", 0) for report in agents.resizes()[changes:]]
            assert not any(lost), f"failure {number}: {lost}\n{agents.logs()}"


@pytest.fixture(params=STAGES)
def release(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put a release before the installed one, for processes to come."""
    folder = installed(request.param, tmp_path / "release")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    return str(request.param)


@pytest.mark.campaign
@pytest.mark.turns
def test_other_versions_go_through_other_dps_and_stages(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = dict(zip(map(str, THREE_TO_ONE), STAGES[release], strict=True))
    given, flags = config(0, deepspeed={"zero_stage": stages}), ("--loader-workers", "0")
    alone = run_alone(tmp_path / "alone", given, *flags)
    agents = train_through(tmp_path / "elastic", given, THREE_TO_ONE, monkeypatch, *flags)
    assert alone.wait(60) == 0
    reference = lines_of(tmp_path / "alone")
    assert {line["version"] for line in (*reference, *agents.lines())} == {release}
    check(agents, reference, THREE_TO_ONE)
    seen = {(str(line["world"]), line["stage"]) for line in agents.lines()}
    assert seen == set(stages.items())
