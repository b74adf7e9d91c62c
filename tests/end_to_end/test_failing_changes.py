"""A change that fails goes back to what ran, and a script that ends while a change waits has
ended."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scalai.core.errors import PeerError
from support.agents import Agents
from support.tiny_job import check_steps

pytestmark = pytest.mark.fault

FAULTY_JOB = Path(__file__).parents[1] / "support" / "faulty_job.py"


@contextmanager
def faulty(folder: Path, degrees: str, *options: str, **settings: Any) -> Iterator[Agents]:
    script = [str(FAULTY_JOB), "--metrics", str(folder / "metrics.jsonl"), *options]
    with Agents(folder, degrees, script, **settings) as agents:
        yield agents


@pytest.mark.turns
@pytest.mark.parametrize("standby", ["auto", pytest.param("never", marks=pytest.mark.campaign)])
def test_degrees_that_a_script_cannot_run_are_given_up_for_those_that_ran(
    tmp_path: Path, standby: str
) -> None:
    settings = {"resize": f"standby = '{standby}'"}
    degrees = '2 = "tp2"\n1 = "tp1"'
    with faulty(tmp_path, degrees, "--raise-at-world", "1", nodes="1", settings=settings) as agents:
        agents.start("a")
        agents.wait_for_all(2)
        agents.scale(nproc=1)
        agents.wait_until(lambda: "is not tried again" in agents.text(), "the change has failed")
        made = agents.lines()[-1]["step"]
        agents.wait_for_step(made + 5, world=2)
        with pytest.raises(PeerError, match="failed on these hosts before"):
            agents.scale(nproc=1)
        steps = check_steps(agents.lines())
        assert steps == list(range(1, len(steps) + 1)), "each step is made once"


@pytest.mark.campaign
def test_a_host_whose_joining_fails_stays_idle_and_the_others_train_on(tmp_path: Path) -> None:
    degrees = '2 = "tp2"\n4 = "tp2"'
    with faulty(tmp_path, degrees, "--raise-at-world", "4") as agents:
        agents.start("a")
        agents.wait_for_all(2)
        agents.start("b")
        agents.wait_until(lambda: "is not tried again" in agents.text(), "the change has failed")
        made = agents.lines()[-1]["step"]
        agents.wait_for_step(made + 5, world=2)
        agents.drain("b")
        assert agents.exit_code("b") == 0
        steps = check_steps(agents.lines())
        assert steps == list(range(1, len(steps) + 1)), "each step is made once"


@pytest.mark.turns
@pytest.mark.parametrize(
    ("how", "is_forked"),
    [
        ((), True),
        (("--exit",), False),
        pytest.param(("--exit",), True, marks=pytest.mark.campaign),
    ],
)
def test_a_script_that_ends_while_a_stop_waits_for_it_has_ended(
    tmp_path: Path, how: tuple[str, ...], is_forked: bool
) -> None:
    """It is behind its loop, in an evaluation or its last save, and will not come to the stop."""
    with faulty(
        tmp_path, '2 = "tp2"\n1 = "tp1"', "--enough", str(tmp_path / "enough"), "--after-s", "12",
        *how, nodes="1", settings={"resize": "standby = 'never'"},
    ) as agents:  # fmt: skip
        agents.start("a")
        if is_forked:
            agents.wait_until(lambda: "event=warm" in agents.text(), "workers can be forked")
            agents.scale(nproc=1)
        agents.wait_for_all(1 if is_forked else 2)
        agents.let_end()
        agents.wait_until((tmp_path / "behind-the-loop").exists, "the loop has ended")
        agents.scale(nproc=2 if is_forked else 1)
        assert agents.exit_code("a") == 0, agents.logs()
        steps = check_steps(agents.lines())
        assert steps == list(range(1, len(steps) + 1))
