"""Workers and hosts of a DeepSpeed job die at the places of a change: same samples, same losses as
in a run that never stopped."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.accelerator import ACCELERATOR
from support.agents import Agents
from support.deepspeed_elastic import (
    STEPS_PER_EPOCH,
    arguments,
    compare,
    config,
    lines_of,
    run_alone,
)

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]

EPOCHS = 60
PLACES = ("drain", "write", "written", "commit", "relaunch", "plan", "move", "restore", "leave")
"""Where a worker may die in a change."""


@contextlib.contextmanager
def training(
    folder: Path,
    stage: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    replicas: int = 1,
    **settings: Any,
) -> Iterator[Agents]:
    """Give a job that may lose anybody. Then it trains to its end, and each of its steps, however
    often it was made, must be that of the uninterrupted run."""
    monkeypatch.setenv("DS_ACCELERATOR", ACCELERATOR)
    given = config(stage, store={"snapshot_every": 5, "replicas": replicas})
    flags = ("--loader-workers", "0", "--epochs", str(EPOCHS))
    alone = run_alone(folder / "alone", given, *flags)
    elastic = folder / "elastic"
    elastic.mkdir()
    (elastic / "ds.json").write_text(json.dumps(given))
    script = arguments(elastic, "--step-s", "0.6", *flags)
    restarts = ("--max-restarts", "100")
    again = {"resize.quarantine_s": 0.0}  # the same hosts die again and again
    with Agents(elastic, None, script, flags=restarts, constants=again, **settings) as agents:
        yield agents
        (elastic / "hurry").touch()
        assert agents.exit_code("a") == 0, agents.logs()
    assert alone.wait(60) == 0
    made = agents.lines()
    assert {line["step"] for line in made} == set(range(1, STEPS_PER_EPOCH * EPOCHS + 1))
    compare(made, lines_of(folder / "alone"))


@pytest.mark.turns
@pytest.mark.parametrize("stage", [0, 3])
def test_a_worker_may_die_at_every_place_of_a_change(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a stage the other ranks have all that the dead one had, and no step is lost. Where
    state is in shards, what dies before it is written is gone, and the newest snapshot counts."""
    with training(tmp_path, stage, monkeypatch, nodes="1") as agents:
        agents.start("a")
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


@pytest.mark.fault
@pytest.mark.turns
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_failure_in_training_costs_no_step_where_the_state_lives_on(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank raises, and what it holds is written by its own process; without a stage it may as
    well be killed."""
    with training(tmp_path, stage, monkeypatch, nodes="1") as agents:
        agents.start("a")
        agents.wait_for_step(3, world=2)
        for number in range(2):
            agents.wait_for_all(2)
            changes, step = len(agents.resizes()), agents.lines()[-1]["step"]
            agents.wait_until(lambda: agents.lines()[-1]["step"] > step, "a step of this round")  # noqa: B023
            if stage == 0 and number:
                agents.kill_worker(1)
            else:
                (tmp_path / "elastic" / f"raise-{number}").touch()
            check_lost(agents, changes, f"failure {number}")


def place_of(agents: Agents, position: int) -> str:
    """Return the host of a rank, or behind the last rank an idle one."""
    return str(list(agents.resizes()[-1]["workers"])[position])


def two_hosts(agents: Agents) -> None:
    """Start hosts of one rank each."""
    agents.start("a")
    agents.start("b")
    agents.wait_for_world(2)
    agents.wait_until(
        lambda: any(sum(r["workers"].values()) == 2 for r in agents.resizes()),
        "both hosts have stepped",
    )


def host_dies(agents: Agents, place: str, host: str, cause: Callable[[], None]) -> int:
    """Kill an agent at a place of the change that ``cause`` brings; return how many changes there
    were before."""
    changes = len(agents.resizes())
    agents.arm(place, host)
    cause()
    agents.wait_for_death()
    agents.exit_code(host)
    return changes


def check_lost(agents: Agents, changes: int, place: str, most: int = 0) -> None:
    """The next change is over, and it has cost no more steps than that."""
    agents.wait_until(lambda: len(agents.resizes()) > changes, f"steps after {place}")
    lost = [report.get("steps_lost", 0) for report in agents.resizes()[changes:]]
    assert max(lost) <= most, f"{place}: {lost}\n{agents.logs()}"


def test_a_host_whose_shards_are_needed_brings_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In stage 3 nobody else has them, where there are no replicas: the job waits for the host,
    whose memory has stayed. What was written is not lost; of what was not, the newest snapshot
    counts."""
    with training(tmp_path, 3, monkeypatch, replicas=0, slots=1) as agents:
        two_hosts(agents)
        for world, place, position in ((1, "write", 1), (2, "commit", 0), (1, "restore", 0)):
            victim = place_of(agents, position)
            changes = host_dies(agents, place, victim, lambda: agents.scale(nproc=world))  # noqa: B023
            agents.start(victim)
            agents.wait_for_world(world)
            check_lost(agents, changes, place, most=10 if place == "write" else 0)
