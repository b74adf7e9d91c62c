"""Models and degrees that tests of Megatron jobs have in common, as fields of ``jobs.Job``, and how
far losses of two layouts may differ."""

from typing import Any

FP32 = 1e-6
"""Layouts differ in the order of additions: 1e-8 to 8e-8 were measured, with no resize too."""
BF16 = 2e-4
"""The masters are exact; activations and gradients round elsewhere: up to 5e-5 were measured."""
FP16 = 1e-4
"""As bf16 with three more bits, as long as DP, and with it the path of the loss scale, stays."""
EXACT = 0.0

Fields = dict[str, Any]

ONE: Fields = {}
DP2: Fields = {"world": 2}
DP3: Fields = {"world": 3}
DP4: Fields = {"world": 4}
TP2: Fields = {"world": 2, "tp": 2}
TP4: Fields = {"world": 4, "tp": 4}
PP2: Fields = {"world": 2, "pp": 2}
PP4: Fields = {"world": 4, "pp": 4}
VPP2: Fields = {"world": 2, "pp": 2, "vpp": 2}
TP2DP2: Fields = {"world": 4, "tp": 2}
PP2DP2: Fields = {"world": 4, "pp": 2}
TP2PP2: Fields = {"world": 4, "tp": 2, "pp": 2}
EP2: Fields = {"world": 2, "ep": 2}
EP4: Fields = {"world": 4, "ep": 4}
EP2DP2: Fields = {"world": 4, "ep": 2}
PP2EP2: Fields = {"world": 4, "pp": 2, "ep": 2}
TP2EP2: Fields = {"world": 4, "tp": 2, "ep": 2, "sequence_parallel": True}

SPLIT: Fields = {"distributed": True}
BUCKETS: Fields = {"distributed": True, "overlap": True}
GATED: Fields = {"query_groups": 2, "is_gated": True}
MOE: Fields = {"experts": 4, "is_gated": True, "layers": 2}
TEXT: Fields = {
    "padded_vocabulary": 50304, "vocabulary": 50257, "hidden": 16, "heads": 2, "layers": 2,
}  # fmt: skip
UNTIED: Fields = {"is_tied": False}
EIGHT: Fields = {"global_batch_size": 8}
AGAIN: Fields = {"recompute": "full"}
SIX: Fields = {"global_batch_size": 6}
OVERFLOWS: Fields = {"precision": "fp16", "loss_scale": 2.0**20}
"""Steps 0 and 3 of 6 are skipped: one before the resize and one after it."""
