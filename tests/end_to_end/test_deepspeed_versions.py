"""One common job with a release of every minor version of DeepSpeed that is known.

The installed version goes through all the other tests. For the campaign: each release is built.
"""

import os
from pathlib import Path

import pytest

from support.deepspeed_elastic import check, config, lines_of, run_alone, train_through
from support.deepspeed_releases import installed

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]

WORLDS = (3, 2, 1)
STAGES = {"0.16.9": (2, 3, 1), "0.17.6": (1, 3, 0), "0.18.9": (2, 3, 1)}
"""Stage 2 of 0.17.6 loses gradients, and is refused."""


@pytest.fixture(params=STAGES)
def release(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put a release before the installed one, for processes to come."""
    folder = installed(request.param, tmp_path / "release")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    return str(request.param)


def test_other_versions_go_through_other_dps_and_stages(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = dict(zip(map(str, WORLDS), STAGES[release], strict=True))
    given, flags = config(0, deepspeed={"zero_stage": stages}), ("--loader-workers", "0")
    alone = run_alone(tmp_path / "alone", given, *flags)
    agents = train_through(tmp_path / "elastic", given, WORLDS, monkeypatch, *flags)
    assert alone.wait(60) == 0
    reference = lines_of(tmp_path / "alone")
    assert {line["version"] for line in (*reference, *agents.lines())} == {release}
    check(agents, reference, WORLDS)
    seen = {(str(line["world"]), line["stage"]) for line in agents.lines()}
    assert seen == set(stages.items())
