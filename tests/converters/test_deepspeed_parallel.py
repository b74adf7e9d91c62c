"""DeepSpeed checkpoints of pipelines and of tensor-parallel ranks, at other degrees."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deepspeed_jobs import SAVED_AFTER, STEPS, Job

from scalai.converters.checkpoint import Checkpoint, ReadOptions, WriteOptions
from scalai.converters.engine import Limits, reshard
from scalai.converters.layouts import layout_named, open_checkpoint
from scalai.converters.verify import verify

Runner = Callable[[Job], list[dict[str, Any]]]
Saver = Callable[[Job], tuple[Path, list[dict[str, Any]]]]
Degrees = dict[str, int]

TOLERANCE = 1e-6
LIMITS = Limits(memory_bytes=256 << 20, workers=1)

CUTS = r"""
[[cut]]
parameters = '.*\.gate_up'
dimension = 0
parts = 2

[[cut]]
parameters = '.*\d\.bias'
dimension = 0

[[cut]]
parameters = '.*\.down'
dimension = 1

[[cut]]
parameters = '.*norm\..*|.*down_bias|.*embed.*|\d+\.weight'
"""
INFO = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r".*norm\.", r".*down_bias", r".*embed.*weight"],
    "parameter_with_row_parallelism_patterns": [r".*\.down$"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*gate_up"],
}
PIPE_INFO = {**INFO, "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed"]}
"""What Megatron-DeepSpeed says of such parameters; what no pattern has is cut along dimension 0."""


def at(tp: int = 0, pp: int = 0, dp: int = 1, **more: Any) -> Job:
    return Job(world=max(tp, 1) * max(pp, 1) * dp, tp=tp, pp=pp, **more)


CASES = [
    ("tp2-pp2-to-dp2", at(tp=2, pp=2, info=PIPE_INFO), at(pp=1, dp=2)),
    ("stage-3-tp2-to-stage-1-dp3", at(tp=2, stage=3), at(tp=1, dp=3)),
]
LONG_CASES = [
    ("pp2-to-pp1-dp2", at(pp=2), at(pp=1, dp=2)),
    ("pp1-to-pp3", at(pp=1), at(pp=3)),
    ("pp3-to-pp2-dp2", at(pp=3), at(pp=2, dp=2)),
    ("uniform-pp3-to-pp2", at(pp=3, partition="uniform"), at(pp=2, partition="uniform")),
    ("untied-pp2-dp2-to-pp4", at(pp=2, dp=2, tied=False), at(pp=4, tied=False)),
    ("by-type-pp1-to-pp3", at(pp=1, partition="type:block"), at(pp=3, partition="type:block")),
    ("stage-1-pp2-to-stage-0-pp1", at(pp=2), at(pp=1, stage=0)),
    ("pp1-to-tp2-pp2", at(pp=1), at(tp=2, pp=2)),
    ("tp1-dp2-to-stage-2-tp2", at(tp=1, dp=2), at(tp=2, stage=2)),
    ("tp2-dp2-to-stage-3-tp4", at(tp=2, dp=2), at(tp=4, stage=3)),
    ("stage-0-tp2-to-stage-1-tp1", at(tp=2, stage=0), at(tp=1)),
    ("stage-2-tp2-to-stage-0-tp1", at(tp=2, stage=2, info=INFO), at(tp=1, stage=0)),
]
PARTS = {"type:block": '[pipeline]\npartition_method = "type"\n'}


@pytest.fixture(scope="module")
def save(run_deepspeed: Runner, tmp_path_factory: pytest.TempPathFactory) -> Saver:
    """Train, save, train on; once for equal jobs."""
    done: dict[str, tuple[Path, list[dict[str, Any]]]] = {}

    def run(job: Job) -> tuple[Path, list[dict[str, Any]]]:
        if repr(job) not in done:
            directory = tmp_path_factory.mktemp("saved")
            done[repr(job)] = directory, run_deepspeed(replace(job, save=str(directory)))
        return done[repr(job)]

    return run


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(pytest.param(*values, id=name) for name, *values in CASES),
        *(
            pytest.param(*values, id=name, marks=pytest.mark.campaign)
            for name, *values in LONG_CASES
        ),
    ],
)
def test_a_resharded_checkpoint_goes_on_as_the_run_that_never_stopped(
    run_deepspeed: Runner, save: Saver, tmp_path: Path, before: Job, after: Job
) -> None:
    saved, uninterrupted = save(before)
    mapping = tmp_path / "mapping.toml"
    mapping.write_text(("" if before.info else CUTS) + PARTS.get(before.partition, ""))
    convert(saved, tmp_path / "out", f"deepspeed_zero{after.stage}", after, mapping)
    if after.stage or not after.pp:
        found = [verify(read(path, mapping), 1) for path in (saved, tmp_path / "out")]
        assert found[0] == found[1]
    check(uninterrupted, run_deepspeed(replace(after, load=str(tmp_path / "out"))))


def read(path: Path, mapping: Path | None) -> Checkpoint:
    return open_checkpoint(path, ReadOptions(mapping=mapping))


def convert(source: Path, target: Path, layout: str, job: Job, mapping: Path | None) -> None:
    tp, pp = max(job.tp, 1), max(job.pp, 1)
    degrees = {"tp": tp, "pp": pp, "dp": job.world // tp // pp}
    checkpoint = read(source, mapping)
    laid_out = layout_named(layout).lay_out(checkpoint, WriteOptions(degrees, mapping))
    reshard(checkpoint, laid_out, target, LIMITS)


def check(before: Any, after: Any, *, has_buffers: bool = True) -> None:
    """Compare losses, rates, buffers, hyperparameters and what the client saved."""
    expected = before[0]["losses"][SAVED_AFTER:]
    losses = after[0]["losses"]
    difference = max(abs(a - b) / abs(a) for a, b in zip(expected, losses, strict=True))
    print(f"largest relative difference of a loss: {difference:.1e}")
    assert len(losses) == STEPS - SAVED_AFTER
    assert difference <= TOLERANCE
    if has_buffers:
        assert buffers(after, "loaded") == buffers(before, "saved")
    for rank in after:
        assert rank["rates"] == before[0]["rates"][SAVED_AFTER:]
        assert rank["loaded"]["decay"] == before[0]["saved"]["decay"]
        assert rank["loaded"]["samples"] == before[0]["saved"]["samples"]
        assert rank["client_state"] == {"text": "kept", "n": 7}


def buffers(ranks: Any, when: str) -> dict[str, Any]:
    """Return the buffers of all stages."""
    return {name: value for rank in ranks for name, value in rank[when]["buffers"].items()}


def make_universal(tag: Path, output: Path) -> None:
    """Run DeepSpeed's own converter."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(tag), "--output_folder", str(output)]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    subprocess.run(command, check=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
