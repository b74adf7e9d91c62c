"""Checkpoints of transformers' Trainer and of Accelerate, both with DeepSpeed, go on elsewhere."""

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from scalai.converters.consistency import verify
from scalai.converters.describe import read_tensor
from scalai.converters.layouts import open_checkpoint
from scalai.core.errors import ProofError
from support.command import Capsys
from support.command import run as command
from support.needed import need
from support.training.deepspeed_checks import cases
from support.training.deepspeed_jobs import Job, Runner

need("accelerate", "pip install transformers accelerate")

SUPPORT = Path(__file__).parents[1] / "support"
TRAINER, ACCELERATE = SUPPORT / "trainer_script.py", SUPPORT / "accelerate_script.py"
SAVED_AFTER, STEPS, BATCH = 6, 10, 8
FP32 = 1e-6


def configuration(folder: Path, stage: int, **more: Any) -> Path:
    """Write DeepSpeed's configuration as Hugging Face's documentation has it."""
    folder.mkdir(parents=True, exist_ok=True)
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    content = {**dict.fromkeys((*auto, "gradient_clipping"), "auto"), **more}
    path = folder / "deepspeed.json"
    path.write_text(json.dumps({**content, "zero_optimization": {"stage": stage}}))
    return path


def run(
    runner: Runner, script: Path, folder: Path, stage: int, world: int, *flags: object
) -> list[dict[str, Any]]:
    """Run a script in a folder; return what the ranks have recorded, in order."""
    micro_batch, accumulate = (2, BATCH // 2 // world) if BATCH % (2 * world) == 0 else (1, 1)
    assert micro_batch * accumulate * world == BATCH or world == BATCH
    words = {
        "--output": folder / "out", "--notes": folder / "notes" / "n",
        "--deepspeed": configuration(folder, stage), "--micro-batch": micro_batch,
        "--accumulate": accumulate,
    }  # fmt: skip
    given = [str(word) for pair in words.items() for word in pair]
    runner(Job(world=world, script=[str(script), *given, *map(str, flags)]))
    paths = (folder / "notes").glob("n.[0-9]*")
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def by_step(notes: list[dict[str, Any]]) -> dict[int, tuple[float, list[str]]]:
    """Return by step the mean loss and the samples."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for note in notes:
        found[note["step"]].append(note)
    return {
        step: (
            sum(note["loss"] / note["world"] for note in of),
            sorted(name for note in of for name in note["samples"]),
        )
        for step, of in sorted(found.items())
    }


def goes_on(uninterrupted: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    """See that a resumed run does what the other one did."""
    expected = {s: of for s, of in by_step(uninterrupted).items() if s >= SAVED_AFTER}
    found = by_step(resumed)
    assert list(found) == list(expected) == list(range(SAVED_AFTER, STEPS))
    differences = []
    for step, (loss, samples) in expected.items():
        assert found[step][1] == samples, step
        differences.append(abs(found[step][0] - loss) / loss)
    print(f"relative differences of losses: {', '.join(f'{d:.1e}' for d in differences)}")
    assert max(differences) < FP32


CASES = [
    ("stage-1-2-to-4", (1, 2), (1, 4)),
]
LONG_CASES = [
    ("stage-3-2-to-1", (3, 2), (3, 1)),
    ("stage-2-4-to-2", (2, 4), (2, 2)),
    ("stage-3-1-to-stage-1-2", (3, 1), (1, 2)),
    ("stage-1-2-to-stage-0-1", (1, 2), (0, 1)),
]


@pytest.mark.parametrize(("before", "after"), cases(CASES, LONG_CASES))
def test_a_checkpoint_of_trainer_is_resumed_by_it_at_another_number_of_ranks(
    run_deepspeed: Runner, tmp_path: Path, before: tuple[int, int], after: tuple[int, int],
    capsys: Capsys,
) -> None:  # fmt: skip
    """Acceptance case 17."""
    one = run(run_deepspeed, TRAINER, tmp_path / "one", *before, "--save-every", SAVED_AFTER)
    source, new = tmp_path / "one/out" / f"checkpoint-{SAVED_AFTER}", tmp_path / "new"
    layout = f"deepspeed_zero{after[0]}"
    assert command("reshard", source, new, "--dp", after[1], "--to", layout) == 0
    assert "goes on with those of rank r modulo" in capsys.readouterr().out
    for name in ("trainer_state.json", "training_args.bin", "scheduler.pt", "config.json"):
        assert (new / name).read_bytes() == (source / name).read_bytes()
    streams = {path.name for path in new.glob("rng_state*")}
    wanted = {f"rng_state_{rank}.pth" for rank in range(after[1])}
    assert streams == (wanted if after[1] > 1 else {"rng_state.pth"})
    if before[1] > 1:
        for rank, name in enumerate(sorted(streams)):
            of = source / f"rng_state_{rank % before[1]}.pth"
            assert (new / name).read_bytes() == of.read_bytes()
    assert verify(open_checkpoint(new), 1) == verify(open_checkpoint(source), 1)
    goes_on(one, run(run_deepspeed, TRAINER, tmp_path / "two", *after, "--resume", new))
    assert command("inspect", new) == 0
    assert "saved by   transformers' Trainer" in capsys.readouterr().out
    (new / "trainer_state.json").write_text("{}")
    with pytest.raises(ProofError, match=r"trainer_state\.json"):
        verify(open_checkpoint(new), 1)


@pytest.mark.parametrize(("before", "after"), cases(CASES, LONG_CASES[2:3]))
def test_a_checkpoint_of_accelerate_is_loaded_by_it_at_another_number_of_ranks(
    run_deepspeed: Runner, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """Acceptance case 19."""
    one = run(run_deepspeed, ACCELERATE, tmp_path / "one", *before, "--save-at", SAVED_AFTER)
    source, new = tmp_path / "one" / "out", tmp_path / "new"
    assert (
        command("reshard", source, new, "--dp", after[1], "--to", f"deepspeed_zero{after[0]}") == 0
    )
    assert len(list(new.glob("random_states_*.pkl"))) == after[1]
    two = run(run_deepspeed, ACCELERATE, tmp_path / "two", *after, "--resume", new)
    goes_on(one, two)
    rates = [{note["step"]: note["rate"] for note in notes} for notes in (one, two)]
    expected = {step: rate for step, rate in rates[0].items() if step >= SAVED_AFTER}
    assert rates[1] == pytest.approx(expected, rel=1e-6)


ADAPTERS = [("stage-2-2-to-stage-3-1", (2, 2), (3, 1))]
LONG_ADAPTERS = [
    ("stage-3-1-to-stage-1-2", (3, 1), (1, 2)),
    ("stage-1-2-to-stage-2-1", (1, 2), (2, 1)),
    ("stage-3-2-to-stage-0-1", (3, 2), (0, 1)),
]


@pytest.mark.parametrize(("before", "after"), cases(ADAPTERS, LONG_ADAPTERS))
def test_an_adapter_of_peft_goes_on_at_other_degrees_though_its_base_was_not_saved(
    run_deepspeed: Runner, tmp_path: Path, before: tuple[int, int], after: tuple[int, int],
    capsys: Capsys,
) -> None:  # fmt: skip
    """Trainer saves adapters with ``exclude_frozen_parameters``."""
    need("peft", "pip install peft", of_file=False)
    flags = ("--lora", "--save-every", SAVED_AFTER)
    one = run(run_deepspeed, TRAINER, tmp_path / "one", *before, *flags)
    source, new = tmp_path / "one/out" / f"checkpoint-{SAVED_AFTER}", tmp_path / "new"
    layout = f"deepspeed_zero{after[0]}"
    assert command("reshard", source, new, "--dp", after[1], "--to", layout) == 0
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (new / name).read_bytes() == (source / name).read_bytes()
    found = open_checkpoint(new)
    adapter = load_file(new / "adapter_model.safetensors")
    assert len(adapter) == 10
    for name, value in adapter.items():
        of = name.replace("ln_f.", "ln_f.modules_to_save.").rpartition(".")
        _, weights = read_tensor(found, f"param/{of[0]}.default.{of[2]}")
        assert weights.tobytes() == value.tobytes(), name
    prints = [{**verify(open_checkpoint(path), 1)} for path in (source, new)]
    for tensors in prints:  # the frozen embedding, which stages 0 to 2 save by its second name
        tensors.pop("param/base_model.model.transformer.wte.weight", None)
    assert prints[0] == prints[1]
    goes_on(one, run(run_deepspeed, TRAINER, tmp_path / "two", *after, "--lora", "--resume", new))
    capsys.readouterr()
    assert command("reshard", source, tmp_path / "weights", "--to", "safetensors") == 0
    assert "not a model" in capsys.readouterr().out
    for path in (source, new):
        assert command("verify", path) == 0
        said = [line for line in capsys.readouterr().out.splitlines() if "frozen" in line]
        assert len(said) == 1 and "4 layers" in said[0], said


@pytest.mark.campaign
def test_weights_of_a_trainer_are_loaded_by_from_pretrained(
    run_deepspeed: Runner, tmp_path: Path
) -> None:
    import torch
    import transformers

    flags = ("--save-every", SAVED_AFTER)
    run(run_deepspeed, TRAINER, tmp_path / "one", 3, 2, *flags)
    source, new = tmp_path / "one/out" / f"checkpoint-{SAVED_AFTER}", tmp_path / "new"
    assert not (source / "model.safetensors").exists()
    assert command("reshard", source, new, "--to", "safetensors") == 0
    names = {"config.json", "generation_config.json", "model.safetensors", "scalai.json"}
    assert {path.name for path in new.iterdir()} == names
    kind: Any = transformers.GPT2LMHeadModel
    model, info = kind.from_pretrained(new, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.isfinite(model(tokens, labels=tokens).loss)
    shutil.rmtree(new)
