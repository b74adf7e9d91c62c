"""What the demonstration trains with each framework, and what happens to it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from demo_story import Change

ROOT = Path(__file__).resolve().parents[1]
SCHEDULE_STEPS = 1000
"""Steps that the schedules of the learning rate are made for, also that of
``configs/deepspeed_tiny.json``."""


@dataclass(frozen=True, slots=True)
class Framework:
    """A training and its story.

    ``launch``: flags of ``scalai-run``; ``arguments``: those of the script; ``compiles``: a Python
    program that compiles what the framework compiles at its first use, and ends.
    """

    script: Path
    launch: tuple[str, ...]
    arguments: tuple[str, ...]
    model: str
    story: tuple[Change, ...]
    compiles: str = ""


_DEEPSPEED_COMPILES = """
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("ShareMemCommBuilder").load()
"""

FRAMEWORKS: Mapping[str, Framework] = {
    "megatron": Framework(
        ROOT / "examples" / "train_gpt.py",
        ("--elastic", str(ROOT / "configs" / "elastic_gpt_tiny.toml")),
        ("--lr", "5e-4", "--lr-decay-steps", str(SCHEDULE_STEPS)),
        "megatron-core, 4 layers, 4 heads, fp32, no dropout; global batch 12",
        (
            Change("start", "TP2·PP1·DP2"),
            Change("leave", "TP1·PP2·DP1", host="b"),
            Change("join", "TP2·PP2·DP1", host="c"),
            Change("scale", "TP1·PP1·DP3", workers=3),
            Change("scale", "TP1·PP1·DP1", workers=1),
        ),
    ),
    "deepspeed": Framework(
        ROOT / "examples" / "train_deepspeed.py",
        (),
        ("--deepspeed_config", str(ROOT / "configs" / "deepspeed_tiny.json")),
        "DeepSpeed, ZeRO-1 (ZeRO-3 on 2), 4 layers, fp32, no dropout; global batch 12",
        (
            Change("start", "TP1·PP1·DP4"),
            Change("leave", "TP1·PP1·DP2", host="b"),
            Change("join", "TP1·PP1·DP4", host="c"),
            Change("scale", "TP1·PP1·DP3", workers=3),
            Change("scale", "TP1·PP1·DP1", workers=1),
        ),
        _DEEPSPEED_COMPILES,
    ),
}
