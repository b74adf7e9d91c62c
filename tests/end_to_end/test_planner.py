"""A job whose degrees are computed: it measures its steps, tries others, and keeps the best."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.agents import Agents
from support.tiny_job import check_steps

pytestmark = pytest.mark.timeout(600)

JOB = Path(__file__).parents[1] / "support" / "planned_job.py"
# Eleven layers: the tiny job has no pipelines.
MODEL = (
    "--num-layers 11 --hidden-size 768 --num-attention-heads 12 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 12 "
    "--padded-vocab-size 1536"
)
DEVICE = (
    'gpu = "mine"\nfigures = { tflops = 0.5, memory-gb = 16, memory-gb-s = 20, link-gb-s = 2, '
    "network-gbit-s = 10, per-host = 2 }\n"
)


@contextmanager
def planned(folder: Path, *seconds: float, planner: str) -> Iterator[Agents]:
    """Run a job whose steps take so many seconds with TP 1, with TP 2."""
    script = [
        str(JOB), *MODEL.split(), "--step-s-of-tp", *map(str, seconds),
        "--metrics", str(folder / "metrics.jsonl"), "--enough", str(folder / "enough"),
    ]  # fmt: skip
    settings = {"planner": DEVICE + planner, "model": "num_layers = 11"}
    with Agents(folder, "", script, nodes="1", settings=settings) as agents:
        yield agents


@pytest.mark.turns
def test_degrees_are_computed_from_the_start_where_a_person_says_so(tmp_path: Path) -> None:
    with planned(tmp_path, 0.02, 0.02, planner='kind = "cost"') as agents:
        agents.start("a")
        agents.wait_for_step(5)
        assert "by cost: " in agents.text()
        agents.wait_until(lambda: "event=ahead one_more=" in agents.text(), "it looks ahead")
        agents.let_end()
        assert agents.exit_code("a") == 0


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.parametrize(("slow", "fast", "ends_with"), [(1.2, 0.2, 2), (0.3, 1.5, 1)])
def test_a_contender_is_tried_in_the_live_job_and_the_faster_one_stays(
    tmp_path: Path, slow: float, fast: float, ends_with: int
) -> None:
    trials = 'kind = "auto"\ntrial_steps = 10\nresidence_s = 1e7'
    with planned(tmp_path, slow, fast, planner=trials) as agents:
        agents.start("a")
        agents.wait_until(lambda: "event=measured degrees=TP1·PP1·DP2" in agents.text(), "A")
        agents.wait_until(lambda: "tried for 10 steps" in agents.text(), "a trial")
        agents.wait_until(lambda: "event=measured degrees=TP2·PP1·DP1" in agents.text(), "B")
        made = agents.lines()[-1]["step"]
        agents.wait_until(
            lambda: (
                agents.lines()[-1]["step"] > made + 10 and agents.lines()[-1]["tp"] == ends_with
            ),
            "the faster one runs",
        )
        agents.let_end()
        assert agents.exit_code("a") == 0
        steps = check_steps(agents.lines())
        assert steps == list(range(1, len(steps) + 1)), "each step is made once"
