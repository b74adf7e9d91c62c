"""Over changes and failures each sample of a job is seen once, and `scalai ledger` proves it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalai.core.dataset.ledger import Ledger
from scalai.core.dataset.order import GlobalBatches
from scalai.core.dataset.table import DatasetTable
from scalai.vfs.tree import Tree
from support.agents import Agents, tiny_agents
from support.tiny_order import ORDER, RAMP

pytestmark = pytest.mark.fault

SCALAI = Path(sys.executable).with_name("scalai")


def verify(*what: object) -> tuple[int, Any]:
    """Run the command; return its exit code and what it found."""
    done = subprocess.run(
        [SCALAI, "ledger", "verify", "--json", *map(str, what)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout or "{}") or done.stderr


def told(directory: Path) -> DatasetTable:
    """Return what a job says of its data sets by what lies in a directory."""
    with closing(Tree(directory)) as tree:
        return tree.told


def test_a_job_that_loses_steps_and_changes_proves_each_sample_once(tmp_path: Path) -> None:
    durable = tmp_path / "durable"
    flags = ("--max-restarts", "9", "--durable-dir", str(durable))
    degrees = '2 = "tp2"\n1 = "tp1"'
    (tmp_path / "corpus").write_bytes(b"{}\n")
    named = DatasetTable({"corpus": str(tmp_path / "corpus")}, shuffle={"corpus": 7})
    settings = {"dataset": f"sources.corpus = '{named.sources['corpus']}'\nshuffle.corpus = 7"}
    named = replace(named, global_batch_size=12)  # what [model] says
    with tiny_agents(tmp_path, degrees, nodes="1", flags=flags, settings=settings) as agents:
        agents.start("a")
        agents.wait_for_step(8, world=2)
        agents.kill_worker(0)  # half of the state is nowhere else: the job goes back to its start
        agents.wait_until(lambda: len(agents.resizes()) == 2, "the round after the failure")
        lost = agents.resizes()[1]["steps_lost"]
        assert lost >= 8
        agents.wait_for_step(lost + 5)
        agents.scale(nproc=1)
        agents.wait_for_world(1)
        code, live = verify(agents.job, "--store-dir", agents.store)
        assert code == 0 and live["is_kept"], live
        assert told(agents.store / agents.job) == named
        agents.drain("a")
        assert agents.exit_code("a") == 75, agents.logs()
    assert told(durable / agents.job) == named, "also of a job that has ended"
    code, found = verify(durable / agents.job)
    assert code == 0 and found["is_kept"], found
    ledger = Ledger.from_json(found["ledger"])
    assert ledger.at == (found["step"], 3 * found["step"]) and ledger.since == (0, 0)
    sizes = [stretch.degrees["tp"] for stretch, _, _ in ledger.rounds()]
    assert sizes == [2, 2, 1], "the first round's stretch is empty: all of it was lost"
    assert [(each.after, each.until) for each in ledger.lost] == [(0, lost)]
    assert "lost and done again" in " ".join(found["notes"])


def expected(step: int) -> list[int]:
    """Return the samples of a step as one process alone draws them."""
    return ORDER.samples_at(np.arange(*GlobalBatches.of(RAMP).places(step - 1))).tolist()


def check_draws(lines: Sequence[Mapping[str, Any]]) -> None:
    """Check what each step has drawn, also where it was done again."""
    wrong = [line for line in lines if line["drawn"] != expected(line["step"])]
    assert not wrong, wrong[:3]


def kill_all_workers(agents: Agents) -> None:
    """Leave nobody who could write what the last steps have made."""
    for process in agents.workers():
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.mark.campaign
def test_a_blend_in_batches_that_grow_keeps_its_order_over_a_kill_and_changes_of_dp(
    tmp_path: Path,
) -> None:
    """The batch grows from 4 to 12 samples within the first steps, in which workers are killed."""
    durable = tmp_path / "durable"
    flags = ("--max-restarts", "9", "--durable-dir", str(durable))
    degrees, settings = '2 = "tp1"\n1 = "tp1"', {"store": "snapshot_every = 5"}
    with tiny_agents(
        tmp_path, degrees, nodes="1", flags=flags, settings=settings, more=("--draws",), step_s=0.1
    ) as agents:
        agents.start("a")
        agents.wait_for_step(8, world=2)
        kill_all_workers(agents)
        agents.wait_until(lambda: len(agents.resizes()) == 2, "the round after the failure")
        lost = agents.resizes()[1]["steps_lost"]
        assert lost > 0
        agents.wait_for_step(14)
        agents.scale(nproc=1)
        step = agents.wait_for_world(1)
        agents.wait_for_step(step + 4)
        agents.scale(nproc=2)
        step = agents.wait_for_world(2)
        agents.wait_for_step(step + 4)
        agents.drain("a")
        assert agents.exit_code("a") == 75, agents.logs()
        lines = agents.lines()
    check_draws(lines)
    assert {len(line["drawn"]) for line in lines} == {4, 8, 12}
    code, found = verify(durable / agents.job)
    assert code == 0 and found["is_kept"], found
    ledger = Ledger.from_json(found["ledger"])
    assert [each.until - each.after for each in ledger.lost] == [lost]
    assert "lost and done again" in " ".join(found["notes"])
    assert {each.data_set for each in ledger.passes} == {"wiki", "code"}
    assert found["samples"] == sum(each.samples for each in ledger.passes)
    assert [stretch.degrees["dp"] for stretch, _, _ in ledger.rounds()] == [2, 2, 1, 2]
