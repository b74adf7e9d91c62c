"""Runs the DeepSpeed script of the tests as an elastic job, and alone as its reference."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from support.accelerator import ACCELERATOR
from support.agents import Agents
from support.alone import start_alone

SCRIPT = Path(__file__).with_name("deepspeed_job.py")
TOLERANCE = 1e-6
AUTOTP_CUTS = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*1\.weight$"], "partition_type": "column"},
        {"patterns": [r".*3\.weight$"], "partition_type": "row"},
    ],
}
"""How AutoTP cuts the script's model."""
EPOCHS = 12
STEPS_PER_EPOCH = 5
"""60 samples in batches of 12."""
STEPS = STEPS_PER_EPOCH * EPOCHS


def config(stage: int, *, batch: int = 12, micro: int = 3, **more: Any) -> dict[str, Any]:
    """Return a DeepSpeed configuration, with the block that makes it elastic."""
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        "zero_optimization": {"stage": stage},
        "scalai": {"resize": {"settle_s": 0.2}, **more},
    }


def run_alone(folder: Path, given: Mapping[str, Any], *flags: str) -> "subprocess.Popen[bytes]":
    """Start the script on one rank, without any launcher: the reference."""
    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps(given))
    return start_alone(folder, arguments(folder, *flags))


def arguments(folder: Path, *flags: str) -> list[str]:
    return [
        str(SCRIPT), "--metrics", str(folder / "metrics.jsonl"), "--epochs", str(EPOCHS),
        "--deepspeed", "--deepspeed_config", str(folder / "ds.json"), "--hurry",
        str(folder / "hurry"), *flags,
    ]  # fmt: skip


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train_through(
    folder: Path,
    given: Mapping[str, Any],
    worlds: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
    *flags: str,
    odd: int = 0,
) -> Agents:
    """Run the script through the worlds, the widest first, to its end; at first it tries one of
    ``odd`` ranks. Returns the job."""
    monkeypatch.setenv("DS_ACCELERATOR", ACCELERATOR)
    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps(given))
    script = arguments(folder, "--step-s", "0.6", *flags)
    with Agents(folder, None, script, nodes="1", slots=worlds[0]) as agents:
        agents.start("a")
        agents.wait_for_step(2, world=worlds[0])
        for changes, world in enumerate(worlds[1:], try_odd(agents, odd) if odd else 1):
            agents.wait_until(lambda: agents.has_reported(changes), "every rank has stepped")  # noqa: B023
            agents.scale(nproc=world)
            agents.wait_for_world(world)
        agents.wait_until(lambda: agents.has_reported(changes + 1), "the last change is made")
        (folder / "hurry").touch()
        assert agents.exit_code("a") == 0, agents.logs()
    return agents


def try_odd(agents: Agents, odd: int) -> int:
    """Have the job change to ``odd`` ranks, and see it go back. Returns how many reports it has
    left."""
    agents.wait_until(lambda: bool(agents.resizes()), "every rank has stepped")
    (first,) = agents.resizes()
    agents.scale(nproc=odd)
    is_back = "the job has gone back"
    agents.wait_until(lambda: agents.resizes()[-1]["before"] not in (None, first["after"]), is_back)
    assert agents.resizes()[-1]["after"] == first["after"]
    return len(agents.resizes())


def check(
    agents: Agents,
    reference: Sequence[Mapping[str, Any]],
    worlds: Sequence[int],
    odd: int = 0,
    changes: int | None = None,
) -> None:
    """Each step was made once, and was that of the uninterrupted run, but for those of ``odd``
    ranks, which compute another function. ``changes`` are as many as ``worlds`` or as given."""
    made = [line for line in agents.lines() if line["world"] != odd]
    reports = agents.resizes()
    refuted = [each for each in reports if "differs" in each.get("function", "")[:7]]
    assert bool(refuted) == bool(odd)
    assert [line["step"] for line in made] == list(range(1, len(reference) + 1)), agents.logs()
    assert tuple(world for world, _ in groupby(line["world"] for line in made)) == worlds
    lost = [report.get("steps_lost", 0) for report in reports if report not in refuted]
    assert lost == [0] * (changes or len(worlds))
    compare(made, reference)


def compare(made: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]) -> None:
    for line in made:
        expected = reference[line["step"] - 1]
        assert (line["samples"], line["lr"]) == (expected["samples"], expected["lr"]), line
        assert line["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE), line
