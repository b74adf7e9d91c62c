"""Trainings with FSDP2 of another torch than ours go through ``scalai reshard`` and on.

``SCALAI_OTHER_TORCH`` names the interpreter (several: divided by colons). Ours reads and writes.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support import fsdp_by_torch
from support.command import Capsys, logged

OTHERS = tuple(filter(None, os.environ.get("SCALAI_OTHER_TORCH", "").split(os.pathsep)))
JOB = f"""[megatron]
num_attention_heads = 2
vocab_size = {fsdp_by_torch.WORDS}
lr = 1e-2
global_batch_size = 8
train_iters = 10
"""


def other(python: str, *words: object) -> list[dict[str, Any]]:
    run = subprocess.run(
        [python, fsdp_by_torch.__file__, *map(str, words)],
        capture_output=True, text=True, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert not run.returncode, run.stderr
    found: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(not OTHERS, reason="SCALAI_OTHER_TORCH names no interpreter with another torch")
@pytest.mark.campaign
@pytest.mark.parametrize("python", OTHERS or ("",))
@pytest.mark.parametrize("form", ["nested", "flat"])
def test_a_training_of_another_torch_goes_on(
    tmp_path: Path, capsys: Capsys, python: str, form: str
) -> None:
    def reshard(*words: object) -> None:
        code, text = logged(capsys, "reshard", *words, "--workers", 1)
        assert code == 0, text

    saved, job = tmp_path / "saved", tmp_path / "job.toml"
    job.write_text(JOB)
    (before,) = other(python, "save", form, 2, saved)
    there = [tmp_path / f"dp{dp}" for dp in (1, 3)]
    for dp, path in zip((1, 3), there, strict=True):
        reshard(saved, path, "--to", "dcp", "--dp", dp)
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    names = "--mapping", "llama", "--args-from"
    reshard(saved, megatron, "--to", "torch_dist", "--tp", 2, *names, job)
    reshard(megatron, back, "--to", "dcp", "--dp", 3, *names, saved)
    first, *others = other(python, "load", form, 3, saved, *there, back)
    assert first["whole"] == before["whole"]
    assert [found == first for found in others] == [True] * 3, (first, others)
    with capsys.disabled():
        print(f"\ntorch {before['torch']}, {form}: {len(before['whole'])} values equal")
