"""What a plan counts for activations is what autograd keeps of a model on megatron-core."""

import json
import subprocess
import sys

import pytest

from scalai.core.degrees.degrees import Degrees
from scalai.core.degrees.passes import Recompute
from scalai.core.planner.columns import Layout, Workload, columns_of
from scalai.core.planner.devices import device_named
from scalai.core.planner.model import ModelShape
from scalai.core.planner.step_memory import kept_activations
from support.model_shapes import gpt

HIDDEN, HEADS, SEQ, MICRO_BATCH, VOCABULARY = 128, 4, 64, 2, 256
"""As in ``support/training/saved_activations.py``."""
GPT = gpt(4, HIDDEN, HEADS, VOCABULARY, SEQ)
GATED = gpt(4, HIDDEN, HEADS, VOCABULARY, SEQ, ffn=320, kv_groups=2, is_gated=True)


def counted(shape: ModelShape, recompute: Recompute = "none", *, dropout: bool = False) -> float:
    work = Workload(shape, MICRO_BATCH, "bf16", is_attention_fused=False, has_dropout=dropout)
    layout = Layout(Degrees(1, 1, 1), MICRO_BATCH, recompute)
    return float(kept_activations(columns_of([(work, device_named("h100"), layout)]))[0])


def test_a_layers_activations_are_what_autograd_keeps() -> None:
    pytest.importorskip("megatron.core")
    done = subprocess.run(
        [sys.executable, "-m", "support.training.saved_activations"],
        capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip
    kept = json.loads(done.stdout.splitlines()[-1])
    assert counted(GPT) == pytest.approx(kept["none"], rel=0.02)
    assert counted(GPT, "selective") == pytest.approx(kept["selective"], rel=0.02)
    assert counted(GPT, "full") == pytest.approx(kept["full"], rel=0.02)
    assert counted(GATED) == pytest.approx(kept["gated"], rel=0.02)
    # On a CPU a dropout keeps its noise in 16 bit, where a GPU has a mask of 8.
    noise = 2 * MICRO_BATCH * SEQ * HIDDEN + MICRO_BATCH * HEADS * SEQ**2
    assert counted(GPT, dropout=True) == pytest.approx(kept["dropout"] - noise, rel=0.02)
