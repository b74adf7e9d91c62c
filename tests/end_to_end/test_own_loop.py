"""A loop of one's own under DDP, on ranks that do not divide its batch: over changes and a rank's
death it learns as without them, and each sample is seen once."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.agents import Agents
from support.weighted_loop import ORDER, Rows, build, loss_of, optimizer_of

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

SCALAI = Path(sys.executable).with_name("scalai")
LOOP = Path(__file__).parents[1] / "support" / "weighted_loop.py"
BEFORE = 3
"""Steps made by each number of ranks before the next change."""
DEATH = 0


@dataclass(frozen=True, slots=True)
class Case:
    """A job on ``worlds`` ranks, one number after the other, or behind a rank's ``DEATH``."""

    name: str
    batch: int
    worlds: tuple[int, ...]
    more: tuple[str, ...] = ()
    model: str = ""


def job(folder: Path, case: Case) -> Agents:
    script = [
        str(LOOP), "--steps", "100000", "--batch", str(case.batch), "--pause-s", "0.1",
        "--metrics", str(folder / "metrics.jsonl"), *case.more,
    ]  # fmt: skip
    return Agents(
        folder, "", script, slots=max(case.worlds), nodes="1", model=case.model,
        flags=("--max-restarts", "9"),
    )  # fmt: skip


def uninterrupted(batch: int, steps: int) -> Iterator[tuple[list[int], float]]:
    """Yield the samples of each step and its loss, from whole batches in this process."""
    model, rows = build(), Rows().rows
    optimizer = optimizer_of(model)
    for begin in range(0, steps * batch, batch):
        samples = ORDER.samples_at(np.arange(begin, begin + batch)).tolist()
        loss = loss_of(model, rows[samples])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield samples, loss.item()


def check(lines: Sequence[dict[str, Any]], case: Case) -> None:
    """Check each step's samples, as its ranks have drawn them, and its loss; a step that a death
    has cut off is made again."""
    steps = [line["step"] for line in lines]
    assert steps == sorted(steps) and len(steps) - steps[-1] <= case.worlds.count(DEATH)
    expected = dict(enumerate(uninterrupted(case.batch, steps[-1]), 1))
    assert set(steps) == set(expected)
    for line in lines:
        samples, loss = expected[line["step"]]
        assert [sample for of_rank in line["drawn"] for sample in of_rank] == samples, line
        assert line["loss"] == pytest.approx(loss, rel=1e-9), line


@pytest.mark.parametrize(
    "case",
    [
        Case("DP3 of 8, a death, DP2", 8, (3, DEATH, 2)),
        *(
            pytest.param(case, marks=pytest.mark.campaign)
            for case in (
                # The start knows the batch alone: DP2, and DP3 once the loop has spoken.
                Case("DP2 of 8 to DP3 by itself", 8, (3, DEATH), (), "global_batch_size = 8"),
                Case("DP6 of 16 to DP3 and back", 16, (6, 3, DEATH, 6), ("--workers", "1")),
                Case("DP3 of 8 to DP2, DP1, DP3", 8, (3, 2, 1, 3, DEATH)),
                Case("DP5 of 18 to DP2, in micro-batches of 2", 18, (5, 2, DEATH), (),
                     "micro_batch_size = 2"),
            )
        ),
    ],
    ids=lambda case: case.name,
)  # fmt: skip
def test_a_loop_with_uneven_shares_learns_as_from_whole_batches(case: Case, tmp_path: Path) -> None:
    ranks = case.worlds[0]
    with job(tmp_path, case) as agents:
        agents.start("a")
        agents.wait_for_step(agents.wait_for_all(ranks) + BEFORE, world=ranks)
        for world in case.worlds[1:]:
            made = len(agents.resizes())
            if world == DEATH:
                agents.kill_worker(1)
            else:
                agents.scale(nproc=world)
                ranks = world
            agents.wait_until(partial(agents.has_reported, made + 1), "the change")
            agents.wait_for_step(agents.wait_for_all(ranks) + BEFORE, world=ranks)
        verify = [str(SCALAI), "ledger", "verify", agents.job, "--store-dir", str(agents.store)]
        subprocess.run(verify, check=True, timeout=120)
        agents.drain("a")
        agents.exit_code("a")
        lines, reports = agents.lines(), agents.resizes()
    check(lines, case)
    of_function = [str(report["function"]) for report in reports if "function" in report]
    assert of_function and all(each.startswith("proven") for each in of_function), of_function


def samples_of(agents: Agents) -> dict[str, int]:
    """Return the samples of each host in the newest step, as its rank has drawn them."""
    line = agents.lines()[-1]
    return {host: len(drawn) for host, drawn in zip(line["hosts"], line["drawn"], strict=True)}


def measured_job(folder: Path, micro_batch: int, nodes: str) -> Agents:
    """Return a job of 8 samples a step, whose host b is slow."""
    (slow := folder / "slow").write_text("b")
    script = [
        str(LOOP), "--steps", "100000", "--batch", "8", "--micro-batch", str(micro_batch),
        "--may-differ", "--pass-s", "0.02", "--slow", str(slow),
        "--metrics", str(folder / "metrics.jsonl"),
    ]  # fmt: skip
    settings = {"planner": "shares = 'measured'"}
    return Agents(folder, "", script, slots=1, nodes=nodes, model="", settings=settings)


@pytest.mark.campaign
@pytest.mark.turns
def test_a_slower_replica_has_a_smaller_share_from_the_next_change_on(tmp_path: Path) -> None:
    with measured_job(tmp_path, 2, "2") as agents:
        agents.start("a")
        agents.start("b")
        agents.wait_until(lambda: "event=paces b=" in agents.text(), "b is known to be slow")
        assert samples_of(agents) == {"a": 4, "b": 4}
        agents.scale(degrees="tp1 pp1 mbs1")
        agents.wait_until(lambda: agents.has_reported(2), "the change")
        agents.wait_for_step(agents.wait_for_world(2) + BEFORE)
        found = samples_of(agents)
        assert 2 <= found["b"] < found["a"] and sum(found.values()) == 8
        lines = agents.lines()
    check(lines, Case("", 8, (2,)))


@pytest.mark.campaign
@pytest.mark.turns
def test_a_replica_that_is_fast_again_gets_its_share_back_at_the_next_change(
    tmp_path: Path,
) -> None:
    with measured_job(tmp_path, 1, "2:3") as agents:
        agents.start("a")
        agents.start("b")
        agents.wait_until(lambda: "event=paces b=" in agents.text(), "b is known to be slow")
        agents.start("c")
        agents.wait_for_step(agents.wait_for_all(3) + BEFORE, world=3)
        assert samples_of(agents) == {"a": 3, "b": 2, "c": 3}
        (tmp_path / "slow").write_text("")
        agents.wait_until(lambda: "event=paces all alike" in agents.text(), "b is fast again")
        agents.drain("c")
        agents.wait_for_step(agents.wait_for_all(2) + BEFORE, world=2)
        assert samples_of(agents) == {"a": 4, "b": 4}
        verify = [str(SCALAI), "ledger", "verify", agents.job, "--store-dir", str(agents.store)]
        subprocess.run(verify, check=True, timeout=120)
        lines = agents.lines()
    check(lines, Case("", 8, (2,)))


@pytest.mark.campaign
@pytest.mark.parametrize("way", ["--way=says-nothing", "--norm"])
def test_a_loop_that_does_not_weigh_its_losses_keeps_even_shares(way: str, tmp_path: Path) -> None:
    with job(tmp_path, Case("", 8, (4,), (way,))) as agents:
        agents.start("a")
        agents.wait_for_step(BEFORE, world=4)
        agents.scale(nproc=3)
        agents.wait_for_step(agents.wait_for_all(2) + BEFORE, world=2)
        agents.drain("a")
        agents.exit_code("a")
        assert {line["world"] for line in agents.lines()} == {4, 2}
