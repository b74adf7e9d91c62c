"""Over changes and failures each sample of a job is seen once, and `scalai ledger` proves it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from scalai.core.dataset.ledger import Ledger
from support.agents import tiny_agents

SCALAI = Path(sys.executable).with_name("scalai")


def verify(*what: object) -> tuple[int, Any]:
    """Run the command; return its exit code and what it found."""
    done = subprocess.run(
        [SCALAI, "ledger", "verify", "--json", *map(str, what)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout or "{}") or done.stderr


def test_a_job_that_loses_steps_and_changes_proves_each_sample_once(tmp_path: Path) -> None:
    durable = tmp_path / "durable"
    flags = ("--max-restarts", "9", "--durable-dir", str(durable))
    degrees = '2 = "tp2"\n1 = "tp1"'
    with tiny_agents(tmp_path, degrees, nodes="1", flags=flags) as agents:
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
        agents.drain("a")
        assert agents.exit_code("a") == 75, agents.logs()
    code, found = verify(durable / agents.job)
    assert code == 0 and found["is_kept"], found
    ledger = Ledger.from_json(found["ledger"])
    assert ledger.at == (found["step"], 3 * found["step"]) and ledger.since == (0, 0)
    sizes = [stretch.degrees["tp"] for stretch, _, _ in ledger.rounds()]
    assert sizes == [2, 2, 1], "the first round's stretch is empty: all of it was lost"
    assert [(each.after, each.until) for each in ledger.lost] == [(0, lost)]
    assert "lost and done again" in " ".join(found["notes"])
