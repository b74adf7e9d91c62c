"""A 3D network over slabs changes their number, and a rank dies in an exchange of halos: losses and
weights are those of a run without slabs."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from support.agents import Agents
from support.alone import start_alone

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

SCALAI = Path(sys.executable).with_name("scalai")
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_slabs.py"
SHAPE = (6, 2, 11, 5, 4)
"""Samples, what goes in and what should come out, and an axis that no number of slabs divides."""
STEPS = 100_000
DEGREES = '1 = "cp1"\n2 = "cp2"\n3 = "cp3"\n4 = "cp4"'
BATCH = ["--global-batch-size", "2", "--channels", "2"]


def write_samples(path: Path, depth: int = SHAPE[2]) -> None:
    values = np.random.default_rng(3).standard_normal((*SHAPE[:2], depth, *SHAPE[3:]))
    values[:, 1] = np.roll(values[:, 0], 1, axis=1) * 0.5
    with h5py.File(path, "w") as file:
        file["volumes"] = values


def command(folder: Path, steps: int, data: Path) -> list[str]:
    return [
        str(EXAMPLE), "--data", str(data), "--key", "volumes", "--steps", str(steps), *BATCH,
        "--metrics", str(folder / "metrics.jsonl"), "--weights", str(folder / "weights.pt"),
    ]  # fmt: skip


def unpartitioned(folder: Path, steps: int, data: Path) -> Mapping[int, float]:
    """Train in one process, which has whole samples, outside of any launcher."""
    folder.mkdir()
    alone = start_alone(folder, command(folder, steps, data))
    assert alone.wait(280) == 0, (folder / "log").read_text()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {entry["step"]: entry["loss"] for entry in map(json.loads, lines)}


def check_bytes_read(lines: Sequence[Mapping[str, Any]]) -> None:
    """Check that each rank reads its slabs, of what goes in also the halos, and nothing more."""
    row = SHAPE[3] * SHAPE[4] * 8
    compared = 0
    for one, next_one in pairwise(lines):
        world = one["world"]
        if next_one["world"] != world or next_one["step"] != one["step"] + 1:
            continue
        compared += 1
        for rank, (before, after) in enumerate(
            zip(one["bytes_read"], next_one["bytes_read"], strict=True)
        ):
            if after > before:  # else another round has begun, in which files are opened anew
                rows = SHAPE[2] // world + (rank < SHAPE[2] % world)
                halos = (rank > 0) + (rank < world - 1)
                assert after - before == 2 * (2 * rows + halos) * row, (world, rank)
    assert compared > 10


def test_a_batch_that_the_replicas_do_not_divide_is_refused(tmp_path: Path) -> None:
    write_samples(tmp_path / "volumes.h5")
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}
    done = subprocess.run(
        [sys.executable, *command(tmp_path, 1, tmp_path / "volumes.h5")],
        env=environment, check=False, timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode and "DP3 does not divide --global-batch-size 2." in done.stderr


@pytest.mark.turns
@pytest.mark.parametrize("worlds", [(2, 1), pytest.param((3, 2, 3, 1), marks=pytest.mark.campaign)])
def test_slabs_change_and_a_rank_dies_in_an_exchange_of_halos(
    tmp_path: Path, worlds: tuple[int, ...]
) -> None:
    first = worlds[0]
    data = tmp_path / "volumes.h5"
    write_samples(data)
    script = [*command(tmp_path, STEPS, data), "--pause-s", "0.1"]
    flags = ("--max-restarts", "9")
    with Agents(tmp_path, DEGREES, script, slots=first, nodes="1", flags=flags) as agents:
        agents.start("a")
        agents.wait_for_step(4, world=first)
        agents.arm("halo", "1")
        agents.wait_for_death()
        agents.wait_until(lambda: len(agents.resizes()) == 2, "the round after the death")
        agents.wait_for_step(agents.wait_for_world(first) + 4)
        for world in worlds[1:]:
            agents.scale(nproc=world)
            agents.wait_for_step(agents.wait_for_all(world) + 4, world=world)
        lost = [change.get("steps_lost", 0) for change in agents.resizes()]
        assert lost == [0] * (1 + len(worlds))
        subprocess.run(
            [SCALAI, "ledger", "verify", agents.job, "--store-dir", agents.store], check=True,
            timeout=120,
        )  # fmt: skip
        agents.drain("a")
        agents.exit_code("a")
        lines = agents.lines()
    weights = torch.load(tmp_path / "weights.pt")
    losses = {line["step"]: line["loss"] for line in lines}
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert {(line["world"], line["cp"]) for line in lines} == {(world, world) for world in worlds}
    expected = unpartitioned(tmp_path / "whole", len(losses), data)
    assert losses == {step: pytest.approx(loss, rel=1e-6) for step, loss in expected.items()}
    for name, value in torch.load(tmp_path / "whole" / "weights.pt").items():
        torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-9)
    check_bytes_read(lines)


@pytest.mark.campaign
def test_a_job_that_is_asked_for_more_slabs_than_its_samples_have_goes_on_as_it_was(
    tmp_path: Path,
) -> None:
    data = tmp_path / "volumes.h5"
    write_samples(data, depth=2)
    script = [*command(tmp_path, STEPS, data), "--pause-s", "0.1"]
    degrees, flags = '3 = "cp2"', ("--max-restarts", "9")
    with Agents(tmp_path, degrees, script, slots=3, nodes="1", flags=flags) as agents:
        agents.start("a")
        agents.wait_for_step(4, world=2)
        agents.scale(degrees="cp3")
        agents.wait_until(lambda: "too few for 3 slabs" in agents.text(), "the reason is told")
        agents.wait_for_step(agents.lines()[-1]["step"] + 20, world=2)
        agents.drain("a")
        agents.exit_code("a")
        steps = [line["step"] for line in agents.lines()]
    assert steps == list(range(1, len(steps) + 1)), "each step is made once"
