"""``scalai plan`` for a DeepSpeed script: its configuration beside a model."""

import json
from pathlib import Path
from typing import Any

import pytest

from scalai.launch.cli import main

MODEL = "[model]\nlayers = 24\nhidden = 2048\nheads = 16\nseq = 2048\nvocab = 51200\n"


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return int(end.value.code or 0)


def plan(
    folder: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], *script: str,
    flags: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    model, path = folder / "model.toml", folder / "ds.json"
    model.write_text(MODEL)
    path.write_text(json.dumps(config))
    given = ["plan", "--gpus", "16", "--gpu", "a100", "--model", str(model), "--json", *flags]
    code = run(*given, "--", "train.py", "--deepspeed_config", str(path), *script)
    said = capsys.readouterr()
    return json.loads(said.out) if code == 0 else said.err


BF16 = {"train_batch_size": 256, "bf16": {"enabled": True}}


def layouts(found: Any) -> list[Any]:
    return [found["best"], *found["runners_up"]]


def test_a_plain_script_is_replicated_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(tmp_path, capsys, {**BF16, "zero_optimization": {"stage": 2}})
    assert found["global_batch"] == 256
    assert {(each["tp"], each["pp"], each["vpp"]) for each in layouts(found)} == {(1, 1, 1)}
    assert found["best"]["sharding"] == 2
    assert "zero_optimization.stage=2" in found["flags"]


def test_autotp_and_stages_are_those_that_deepspeed_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = {**BF16, "tensor_parallel": {"autotp_size": 2}}
    found = plan(tmp_path, capsys, cut, "--num-stages", "2", flags=("--sharding", "1,3"))
    assert found["global_batch"] == 128, "AutoTP's ranks count as replicas"
    for each in layouts(found):
        assert each["tp"] == 1 or each["pp"] == 1
        assert each["sharding"] == 1 or each["pp"] == 1
    assert len({each["tp"] for each in layouts(found)}) > 1


@pytest.mark.parametrize(
    ("config", "flags", "why"),
    [
        ({"bf16": {"enabled": True}}, (), "give the samples of a step"),
        (BF16, ("--global-batch-size", "64"), "not by both"),
        (BF16, ("--precision", "fp16"), "the configuration says it"),
        ({**BF16, "fp16": {"enabled": True}}, (), "both enabled"),
        ({**BF16, "sequence_parallel_size": 2}, (), "Ulysses"),
    ],
)
def test_what_contradicts_or_lacks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any],
    flags: tuple[str, ...], why: str,
) -> None:  # fmt: skip
    assert why in plan(tmp_path, capsys, config, flags=flags)


def test_a_script_alone_does_not_say_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(BF16))
    assert run("plan", "--gpus", "8", "--", "train.py", "--deepspeed", str(path)) == 3
    assert "state it by --model too" in capsys.readouterr().err
