"""A script's flags and degrees are valid where a Megatron-LM checkout begins a job of them, and
nowhere else: its parser, its process groups, its model and its schedule."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from scalai.converters.megatron.rules import release_beside
from support import megatron_lm_job
from support.random_scripts import judge, random_case

CASES = 2_000
STEP_SCHEDULES = (0, 18)
"""From this release on there are schedules of batches instead of ramps."""
CHECKOUTS = megatron_lm_job.CHECKOUTS or ("none",)

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        megatron_lm_job.skip_reason() is not None, reason=megatron_lm_job.skip_reason() or ""
    ),
]


@pytest.mark.turns
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=[Path(one).name for one in CHECKOUTS])
def test_what_we_accept_a_checkout_accepts_and_what_we_refuse_it_refuses(checkout: str) -> None:
    script = str(Path(checkout, "pretrain_gpt.py"))
    release = release_beside(script)
    assert release is not None
    draw = random.Random(int(os.environ.get("SEED", "20")))
    has_newest = release >= STEP_SCHEDULES
    cases = [random_case(draw, has_newest_flags=has_newest) for _ in range(CASES)]
    ours = [judge(case, release=release) for case in cases]
    asked = [
        (case.ranks, verdict.flags, verdict.rows)
        for case, verdict in zip(cases, ours, strict=True)
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "support.training.judged_scripts", checkout],
        input=json.dumps(asked), capture_output=True, text=True, check=True, timeout=500,
    )  # fmt: skip
    theirs = json.loads(done.stdout.splitlines()[-1])
    both = Counter(
        (mine.refused is None, his is None) for mine, his in zip(ours, theirs, strict=True)
    )
    different = [
        (str(case.degrees), case.ranks, " ".join(mine.flags), mine.refused, his)
        for case, mine, his in zip(cases, ours, theirs, strict=True)
        if (mine.refused is None) != (his is None)
    ]
    assert not different
    assert both[True, True] > CASES // 6 and both[False, False] > CASES // 3
