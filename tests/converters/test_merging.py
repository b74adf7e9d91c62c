"""An adapter of PEFT, merged into its base."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalai.converters.checkpoint import Overlay
from scalai.converters.source_files import overlaid
from support.command import Capsys, logged
from support.command import run as command
from support.needed import need

need("peft", "pip install transformers peft")
need("transformers", "pip install transformers peft")


def make(folder: Path, dtype: str, **settings: Any) -> tuple[Path, Path, dict[str, Any]]:
    """Save a tiny random model and an adapter of it; return both, and what PEFT merges them to."""
    import peft
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=settings.pop("is_tied", False),
    )  # fmt: skip
    if settings.pop("conv1d", False):
        config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2)
        settings |= {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder / "base")
    wanted = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "k_proj", "down_proj"]}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{**wanted, **settings}))
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3 if "lora" in name else 1.0)
    adapted.save_pretrained(str(folder / "adapter"))
    expected = adapted.merge_and_unload().state_dict()
    return folder / "base", folder / "adapter", dict(expected)


def merge(base: Path, adapter: Path, new: Path, *more: object) -> int:
    return command("reshard", base, new, "--merge-adapter", adapter, "--workers", 1, *more)


CASES = [
    ("float32", {}),
    ("bfloat16", {"use_rslora": True}),
    ("float16", {"modules_to_save": ["norm", "lm_head"]}),
    ("float32", {"rank_pattern": {"layers.0.self_attn.q_proj": 2}, "alpha_pattern": {"k_proj": 3}}),
    ("float32", {"conv1d": True, "bias": "lora_only"}),
    ("float32", {"init_lora_weights": "mica"}),
    ("float32", {"is_tied": True, "modules_to_save": ["lm_head"], "ensure_weight_tying": True}),
]


@pytest.mark.parametrize(("dtype", "settings"), CASES)
def test_a_merged_model_is_what_peft_makes_of_it(
    tmp_path: Path, dtype: str, settings: dict[str, Any]
) -> None:
    import torch
    import transformers

    base, adapter, expected = make(tmp_path, dtype, **settings)
    files = {path.name: path.read_bytes() for path in base.iterdir()}
    assert merge(base, adapter, tmp_path / "new") == 0
    kind: Any = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(tmp_path / "new", dtype=getattr(torch, dtype))
    before = kind.from_pretrained(base, dtype=getattr(torch, dtype)).state_dict()
    found, changed = model.state_dict(), 0
    assert found.keys() == expected.keys()
    tolerance = {"float32": 1e-6, "bfloat16": 2**-6, "float16": 2**-9}[dtype]  # PEFT rounds twice
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)
        changed += not torch.equal(found[name], before[name])
    assert changed >= 4
    assert files == {path.name: path.read_bytes() for path in base.iterdir()}
    assert command("verify", tmp_path / "new") == 0


def test_a_merged_model_goes_to_another_framework_at_once(tmp_path: Path) -> None:
    base, adapter, _ = make(tmp_path, "float32")
    flags = ("--mapping", "llama", "--to", "torch_dist", "--tp", 2)
    assert merge(base, adapter, tmp_path / "at-once", *flags) == 0
    assert merge(base, adapter, tmp_path / "merged") == 0
    assert command("reshard", tmp_path / "merged", tmp_path / "then", *flags) == 0
    assert command("verify", tmp_path / "at-once", tmp_path / "then") == 0
    assert merge(tmp_path / "merged", adapter, tmp_path / "twice") == 0
    assert command("verify", tmp_path / "merged", tmp_path / "twice") == 4
    assert command("reshard", base, tmp_path / "base-alone", *flags) == 0
    assert command("verify", tmp_path / "base-alone", tmp_path / "then") == 4


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("settings", [
    {"modules_to_save": ["embed_tokens"]}, {"modules_to_save": ["embed_tokens", "lm_head"]},
    {"target_modules": ["q_proj", "lm_head"]},
])  # fmt: skip
def test_an_adapter_that_unties_its_base_is_refused(
    tmp_path: Path, capsys: Capsys, settings: dict[str, Any]
) -> None:
    base, adapter, _ = make(tmp_path, "float32", is_tied=True, **settings)
    words = ("reshard", base, tmp_path / "new", "--merge-adapter", adapter, "--workers", 1)
    code, said = logged(capsys, *words)
    assert code == 3 and "are one tensor (tie_word_embeddings)" in said, said


def test_a_base_saved_without_the_module_around_it_is_known(tmp_path: Path) -> None:
    """As the hub has GPT-2 and BLOOM."""
    from safetensors.numpy import load_file, save_file

    base, adapter, _ = make(tmp_path, "float32", conv1d=True)
    assert merge(base, adapter, tmp_path / "whole") == 0
    file, around = base / "model.safetensors", "transformer."
    bare = {name.removeprefix(around): value for name, value in load_file(file).items()}
    save_file(bare, file, {"format": "pt"})
    assert merge(base, adapter, tmp_path / "bare") == 0
    whole, bare = (load_file(tmp_path / of / file.name) for of in ("whole", "bare"))
    assert whole.keys() == {f"{around}{name}" for name in bare}
    for name, value in bare.items():
        np.testing.assert_array_equal(value, whole[f"{around}{name}"])


def test_every_box_of_a_matrix_is_changed_alike() -> None:
    values = np.random.default_rng(0)
    left = values.integers(-3, 4, (6, 2)).astype(np.float32)
    right = values.integers(-3, 4, (2, 10)).astype(np.float32)
    base = values.integers(-9, 9, (6, 10)).astype(np.float32)
    expected = base + 2 * (left @ right)
    overlay = Overlay(64, 64 + base.nbytes, left, right, 2.0, is_sum=True)
    boxes: tuple[Callable[[Any], Any], ...] = (
        lambda of: of, lambda of: of.T, lambda of: of[1:4, 3:], lambda of: of[::2, 4:5],
        lambda of: of.reshape(2, 3, 10)[1:, ::2].transpose(2, 0, 1), lambda of: of[5],
        lambda of: of[:, 9], lambda of: of.reshape(6, 2, 5)[2:, 1], lambda of: of[3, 3:3],
    )  # fmt: skip
    for box in boxes:
        view = box(base)
        begin = 64 + view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        found = overlaid(view.view(np.uint32), "F32", overlay, begin)
        np.testing.assert_array_equal(found.view(np.float32), box(expected))


def test_what_is_no_adapter_of_this_base_is_refused_by_name(tmp_path: Path, capsys: Capsys) -> None:
    from safetensors.numpy import load_file, save_file

    base, adapter, _ = make(tmp_path, "float32")
    weights, layer = load_file(adapter / "adapter_model.safetensors"), "layers.1.self_attn.q_proj"
    settings = json.loads((adapter / "adapter_config.json").read_text())
    key = f"base_model.model.model.{layer}.lora_{{}}.weight"
    a, b = key.format("A"), key.format("B")

    def refused(text: str, new: dict[str, Any], source: Path = base, **changed: Any) -> None:
        shutil.rmtree(tmp_path / "odd", ignore_errors=True)
        (tmp_path / "odd").mkdir()
        save_file(new, tmp_path / "odd" / "adapter_model.safetensors")
        content = json.dumps({**settings, **changed})
        (tmp_path / "odd" / "adapter_config.json").write_text(content)
        words = ("reshard", source, tmp_path / "new", "--merge-adapter", tmp_path / "odd")
        code, said = logged(capsys, *words, "--workers", 1)
        assert code == 3 and text in said and not (tmp_path / "new").exists(), said

    refused(
        f"no {b.removeprefix('base_model.model.')}", {k: v for k, v in weights.items() if k != b}
    )
    refused("rank 3 is expected", weights, r=3)
    refused("NaN", {**weights, a: np.full_like(weights[a], np.nan)})
    refused("another base", {**weights, b: np.ones((99, 4), np.float32)})
    refused("lacks 2 of", {k.replace("layers.1", "layers.7"): v for k, v in weights.items()
                           if "layers.1.mlp" in k or "layers.1.self_attn.k" in k})  # fmt: skip
    refused("use_dora", weights, use_dora=True)
    refused("init_lora_weights", weights, init_lora_weights="pissa")
    refused("'IA3'", weights, peft_type="IA3")
    refused("no factor", {**weights, a.replace("lora_A", "lora_magnitude_vector"): np.ones(3)})
    refused("alpha_pattern", weights, alpha_pattern={"(": 1})
    for slow in ("(a+)+b", ".*" * 50 + "b"):
        refused("rank_pattern", weights, rank_pattern={slow: 1})
    (tmp_path / "empty").mkdir()
    assert logged(capsys, "reshard", base, tmp_path / "new", "--merge-adapter",
                  tmp_path / "empty")[0] == 3  # fmt: skip
