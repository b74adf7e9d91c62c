"""Values of our block that are ``auto`` are none of Accelerate's."""

from types import SimpleNamespace
from typing import Any

import pytest

from scalai.patches.hugging_face.loop_hooks import hook_plugin

dataclasses = pytest.importorskip(
    "accelerate.utils.dataclasses", reason="pip install transformers accelerate"
)


def config(**more: Any) -> dict[str, Any]:
    counts = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {**dict.fromkeys(counts, 1), "zero_optimization": {"stage": 1}, **more}


OURS = {"store": {"snapshot_every": "auto"}, "resize": {"standby": "auto"}}


def test_accelerate_takes_the_block_for_its_own_without_the_hook() -> None:
    plugin = dataclasses.DeepSpeedPlugin(hf_ds_config=config(scalai=OURS))
    with pytest.raises(ValueError, match=r"scalai\.store\.snapshot_every"):
        plugin.deepspeed_config_process(must_match=False)


def test_with_it_the_block_is_passed_over_and_nothing_else() -> None:
    own: Any = type("Plugin", (dataclasses.DeepSpeedPlugin,), {})
    own.fill_match = dataclasses.DeepSpeedPlugin.fill_match
    hook_plugin(SimpleNamespace(DeepSpeedPlugin=own))
    plugin = own(hf_ds_config=config(scalai=OURS, train_batch_size="auto"))
    plugin.deepspeed_config_process(must_match=False, train_batch_size=4)
    found = plugin.deepspeed_config
    assert found["train_batch_size"] == 4 and found["scalai"] == OURS
    other = own(hf_ds_config=config(scalai=OURS, bf16={"enabled": "auto"}))
    with pytest.raises(ValueError, match=r"bf16\.enabled"):
        other.deepspeed_config_process(must_match=False)
