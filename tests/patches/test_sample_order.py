"""A global batch has the same samples whatever the micro-batch and DP, by a checkout's own
samplers."""

import json
import subprocess
import sys

import pytest

from support import megatron_lm_job

GLOBAL_BATCH, EPOCH, CONSUMED = 24, 240, 48
LAYOUTS = ((1, 1), (24, 1), (4, 2), (2, 2), (1, 8), (3, 4), (2, 3))

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        megatron_lm_job.skip_reason() is not None, reason=megatron_lm_job.skip_reason() or ""
    ),
]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_the_micro_batch_moves_no_sample_to_another_global_batch(kind: str) -> None:
    cases = [(kind, EPOCH, CONSUMED, GLOBAL_BATCH, micro, dp) for micro, dp in LAYOUTS]
    done = subprocess.run(
        [sys.executable, "-m", "support.training.sampled_batches", str(megatron_lm_job.CHECKOUT)],
        input=json.dumps(cases), capture_output=True, text=True, check=True, timeout=240,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(batches == found[0] for batches in found)
    assert sum(map(len, found[0])) == 5 * GLOBAL_BATCH
