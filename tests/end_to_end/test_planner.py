"""A job whose degrees are computed from its start."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.agents import Agents

pytestmark = pytest.mark.timeout(600)

JOB = Path(__file__).parents[1] / "support" / "planned_job.py"
# Eleven layers: the tiny job has no pipelines.
MODEL = (
    "--num-layers 11 --hidden-size 768 --num-attention-heads 12 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 12 "
    "--padded-vocab-size 1536"
)


@contextmanager
def planned(folder: Path, *seconds: float, planner: str) -> Iterator[Agents]:
    """Run a job whose steps take so many seconds with TP 1, with TP 2."""
    script = [
        str(JOB), *MODEL.split(), "--step-s-of-tp", *map(str, seconds),
        "--metrics", str(folder / "metrics.jsonl"), "--enough", str(folder / "enough"),
    ]  # fmt: skip
    settings = {"planner": planner, "model": "num_layers = 11"}
    with Agents(folder, "", script, nodes="1", settings=settings) as agents:
        yield agents


@pytest.mark.turns
def test_degrees_are_computed_from_the_start_where_a_person_says_so(tmp_path: Path) -> None:
    with planned(tmp_path, 0.02, 0.02, planner='kind = "cost"\ngpu = "a100-80gb"') as agents:
        agents.start("a")
        agents.wait_for_step(5)
        assert "by cost: " in agents.text()
        agents.wait_until(lambda: "event=ahead one_more=" in agents.text(), "it looks ahead")
        agents.let_end()
        assert agents.exit_code("a") == 0
