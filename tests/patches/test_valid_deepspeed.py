"""A configuration and degrees are valid where DeepSpeed itself builds an engine of them, and
nowhere else; its step has the samples of the job."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from scalai.core.release import numbers_of
from scalai.launch.config import script_facts as script
from support.deepspeed_releases import installed
from support.random_deepspeed import Case, Verdict, is_stated, judge, offered, random_case

CASES, CAMPAIGN_CASES, RELEASE_CASES = 160, 2_400, 600
RELEASES = ("0.16.9", "0.17.6", "0.18.9")


DECISION = "AutoTP takes all ranks for its own"
"""DeepSpeed builds some of such engines, by chance of equal degrees; docs/degrees.md says why we do
not."""


NOT_TAKEN = "DeepSpeed would not take its configuration"


def cases_of(count: int, release: str = "0.19.8") -> list[Case]:
    draw = random.Random(int(os.environ.get("SEED", "20")))
    return [random_case(draw, numbers_of(release)) for _ in range(count)]


def ask(asked: list[Any]) -> list[tuple[str | None, list[int] | None]]:
    done = subprocess.run(
        [sys.executable, "-m", "support.training.judged_deepspeed"], input=json.dumps(asked),
        capture_output=True, text=True, check=True, timeout=400,
    )  # fmt: skip
    said: list[tuple[str | None, list[int] | None]] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [CASES, pytest.param(CAMPAIGN_CASES, marks=pytest.mark.campaign)])
def test_what_we_accept_deepspeed_accepts_and_what_we_refuse_it_refuses(count: int) -> None:
    deepspeed = pytest.importorskip("deepspeed")
    compare(cases_of(count, deepspeed.__version__))


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.timeout(900)
@pytest.mark.parametrize("release", RELEASES)
def test_so_it_is_in_other_releases(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = installed(release, tmp_path / "release")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(script, "installed_release", lambda _: numbers_of(release))
    compare(cases_of(RELEASE_CASES, release))


def compare(cases: list[Case]) -> None:
    """Ask for all cases, and compare: who accepts, and what samples a step then has."""
    ours = [judge(case) for case in cases]
    theirs = verdicts(cases, ours)
    different = [
        (case, mine, his)
        for case, mine, (his, _) in zip(cases, ours, theirs, strict=True)
        if (mine.refused is None) != (his is None) and DECISION not in (mine.refused or "")
    ]
    assert not different, "\n\n".join(map(str, different[:10]))
    for case, mine, (_, has) in zip(cases, ours, theirs, strict=True):
        if mine.refused is None and has is not None:
            assert (has[0], has[3]) == (mine.samples, case.degrees.dp), (case, mine, has)
    both = Counter(mine.refused is None for mine in ours)
    assert both[True] > len(cases) // 4 and both[False] > len(cases) // 4


def verdicts(cases: list[Case], ours: list[Verdict]) -> list[tuple[str | None, list[int] | None]]:
    """Return what DeepSpeed says of each case: that it refuses one of the configurations, or what
    its engine has."""
    asked = [
        (case.ranks, case.kind, case.degrees.tp, case.degrees.pp, case.layers, config)
        for case, mine in zip(cases, ours, strict=True)
        for config in mine.configs
    ]
    said, found = iter(ask(asked)), []
    for mine in ours:
        each = [next(said) for _ in mine.configs]
        found.append(next((one for one in each if one[0] is not None), each[0]))
    return found


def test_once_a_round_has_told_of_its_model_no_worker_refuses_what_is_offered() -> None:
    judged = [(case, judge(case)) for case in cases_of(CASES) if is_stated(case.config)]
    # A configuration that a worker refuses at any degrees is refused in the first round.
    late = [case for case, found in judged if found.by == "worker" and NOT_TAKEN not in str(found)]
    # A script may build a plain model for one stage: only a round of one stage tells.
    assert all(case.first is None or case.first.pp > 1 for case in late)
    assert all(case.degrees.pp == 1 for case in late)


def test_nothing_is_offered_on_its_own_that_the_script_does_not_cut() -> None:
    for case in cases_of(CASES):
        if case.kind == "plain" and judge(case).by != "job":
            degrees = offered(case)
            assert degrees is None or degrees.model_parallel == 1
