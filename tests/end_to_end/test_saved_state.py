"""A job goes on from what an earlier release of Scalai left on the disk."""

import json
import shutil
from pathlib import Path

import pytest

from support.agents import tiny_agents
from support.tiny_job import check_steps

SAVED = sorted((Path(__file__).parents[1] / "data").glob("*/durable/tiny"))


@pytest.mark.turns
@pytest.mark.parametrize("saved", SAVED, ids=[folder.parents[1].name for folder in SAVED])
def test_a_job_goes_on_from_a_saved_generation_at_other_degrees(
    saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "durable" / "tiny")
    (manifest,) = saved.glob("generation-*/a/manifest.json")
    step = json.loads(manifest.read_text())["step"]
    durable = ("--durable-dir", str(tmp_path / "durable"))
    with tiny_agents(tmp_path, '1 = "tp1"', slots=1, nodes="1", flags=durable) as agents:
        agents.start("c")
        agents.wait_for_step(step + 3)
        agents.let_end()
        assert agents.exit_code("c") == 0, agents.logs()
        steps = check_steps(agents.lines())
    assert steps == list(range(step + 1, step + 1 + len(steps)))
