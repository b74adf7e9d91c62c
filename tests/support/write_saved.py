"""Write what jobs leave and people write for them, as today's code does, to ``tests/data/<name>``.

    PYTHONPATH=tests .venv/bin/python -m support.write_saved [NAME]   # NAME: this release's version

Run it again when one of these formats gets a field: in place of the folder until that release is
tagged, under a new name afterwards. ``tests/test_saved.py`` reads every folder.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import scalai
from scalai.core.degrees.degrees import ModelLimits
from scalai.launch.agent.durable import write_finished
from scalai.launch.config.elastic_config import (
    DERIVED_LIMITS,
    DeepSpeedConfig,
    ProbeConfig,
    ResizeConfig,
    StoreConfig,
    load_config,
)
from support.agents import tiny_agents
from support.mixed_state import NUMBER, stores_of

DATA = Path(__file__).parents[1] / "data"

DEGREES = {
    "default": "tp2 pp1",
    "4": "tp2 pp1",
    "2->4": "tp2 pp2 vpp2",
    "8": ["tp2 pp2", "tp4"],
    "6": {"tp": 3, "pp": 1, "dp": 2, "micro_batch_size": 1},
}
SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "model": {
        "num_attention_heads": 8, "num_query_groups": 4, "num_layers": 8,
        "padded_vocab_size": 256, "global_batch_size": 24, "micro_batch_size": 2,
        "seq_length": 128, "num_experts": 4, "ffn_hidden_size": 64, "expert_tp": 1,
        "expert_ffn_hidden_size": 32, "shared_ffn_hidden_size": 32, "qkv_rows": 128,
        "ramp_batch_sizes": [12], "eval_batch_size": 24, "evaluates_one_micro_batch": True,
        "eval_micro_batch_stays": True, "optimizer_instances": 1, "extra_layers": 0,
        "first_stage_layers": 2, "last_stage_layers": 2, "chunk_group": 4, "needs_chunks": "of it",
        "is_sequence_parallel": False, "is_query_group_shared": True,
    },
    "store": {
        "dir": "/dev/shm/mine", "budget_gb": 1.5, "snapshot_every": 100,
        "replicas": 2, "emergency": False, "durable_dir": "/mnt/kept", "durable_every_s": 600.0,
    },
    "resize": {
        "settle_s": 1.5, "drain_timeout_s": 60, "allowed_sizes": [2, 4, 6, 8],
        "min_model_parallel": 2, "standby": "auto",
        "coordinator_timeout_s": 500.0, "start_timeout_s": 900.0, "hang_s": 900.0,
        "silent_s": 20.0, "prove_function": "never",
    },
    "probe": {
        "kind": "command", "command": "echo 2", "interval_s": 2.5, "health_check": "true",
    },
    "deepspeed": {"zero_stage": {"2": 3, "default": 1}, "data_order": "own", "cuts": "gpt"},
}  # fmt: skip
KINDS = {
    "model": ModelLimits, "store": StoreConfig, "resize": ResizeConfig, "probe": ProbeConfig,
    "deepspeed": DeepSpeedConfig,
}  # fmt: skip
HOST_FILE = "# two hosts\nworker-1 slots=4\n\nworker-2 slots=2\n"
UNSAID = {"file", "refused"}
"""Keys that another one excludes, or that no file states."""


def write(folder: Path) -> None:
    """Write everything to a new folder."""
    for name, kind in KINDS.items():
        known = {field.name for field in fields(kind)} - UNSAID - set(DERIVED_LIMITS)
        assert set(SECTIONS[name]) == known, f"[{name}] has other keys by now: {known}"
    folder.mkdir(parents=True)
    _configurations(folder)
    write_finished(folder / "durable" / "done", 120, 8)
    with tempfile.TemporaryDirectory() as place:
        _mixed(Path(place), folder / "durable" / "mixed")
    with tempfile.TemporaryDirectory() as place:
        _job(Path(place), folder)


def _configurations(folder: Path) -> None:
    """Write an elastic configuration with every key, what is made of it, a host file, and a
    configuration of DeepSpeed's with the block."""
    tables = {"degrees": DEGREES, **SECTIONS}
    lines = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{json.dumps(key)} = {_toml(value)}" for key, value in table.items()]
    (folder / "elastic.toml").write_text("\n".join(lines) + "\n")
    described = load_config(str(folder / "elastic.toml")).describe()
    (folder / "elastic.txt").write_text(described + "\n")
    (folder / "hostfile").write_text(HOST_FILE)
    deepspeed = {"train_batch_size": 24, "zero_optimization": {"stage": 1}, "scalai": tables}
    (folder / "deepspeed.json").write_text(json.dumps(deepspeed, indent=1) + "\n")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def _mixed(place: Path, folder: Path) -> None:
    """Write a generation of two hosts with tensors of every kind."""
    for store in stores_of(place).values():
        store.copy_to(NUMBER, folder)
        store.close()


def _job(place: Path, folder: Path) -> None:
    """Run a job on two hosts that loses one and gets it back, and keep what it leaves: the last
    generation and the reports of both changes."""
    durable = ("--durable-dir", str(folder / "durable"))
    with tiny_agents(place, '2 = "tp2"\n1 = "tp1"', slots=1, step_s=0.1, flags=durable) as agents:
        for host in ("a", "b"):
            agents.start(host)
        agents.wait_for_all(2)
        agents.drain("b")
        assert agents.exit_code("b") == 0, agents.logs()
        agents.wait_for_world(1)
        agents.start("b")
        agents.wait_for_all(2)
        for host in ("a", "b"):
            agents.drain(host)
        for host in ("a", "b"):
            assert agents.exit_code(host) == 75, agents.logs()
        shutil.copytree(agents.reports, folder / "reports")


if __name__ == "__main__":
    write(DATA / (sys.argv[1] if len(sys.argv) > 1 else scalai.__version__))
