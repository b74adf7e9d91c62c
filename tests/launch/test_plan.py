"""``scalai plan`` says what to take and why, and ends with 3 and the way out where it cannot."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from scalai.launch.cli import main
from support.checkpoints import deepspeed_state, write
from support.legacy_checkpoints import convert, gpt

SCRIPT = (
    "pretrain_gpt.py --num-layers 96 --hidden-size 12288 --num-attention-heads 96 "
    "--seq-length 2048 --max-position-embeddings 2048 --global-batch-size 1536 "
    "--micro-batch-size 1 --bf16 --vocab-size 51200 --use-distributed-optimizer --sequence-parallel"
).split()
LLAMA = {
    "model_type": "llama", "hidden_size": 4_096, "num_attention_heads": 32, "vocab_size": 128_256,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "intermediate_size": 14_336,
    "max_position_embeddings": 8_192, "tie_word_embeddings": False,
}  # fmt: skip
COLUMNS = (
    "source,layers,hidden,heads,seq,vocab,gpus,gpu_type,tp,pp,vpp,dp,micro_batch,global_batch,"
    "recompute,zero_stage,precision,iteration_time_s"
).split(",")
_SC21 = (
    "sc21,24,2304,24,2048,51200,32,A100-80GB,1,1,1,32,16,512,full,0,fp16,3.528",
    "sc21,40,6144,48,2048,51200,256,A100-80GB,8,1,1,32,8,1024,full,0,fp16,9.399",
    "sc21,48,8192,64,2048,51200,512,A100-80GB,8,2,1,32,4,1536,full,0,fp16,14.453",
)
TABLE_1 = [line.split(",") for line in _SC21]
"""arXiv 2104.04473, table 1; layouts from Megatron-LM, examples/academic_paper_scripts/sc21."""


def run(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as end:
        main(["plan", *map(str, words)])
    return int(end.value.code or 0)


def table(path: Path, *rows: list[Any]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return path


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def test_a_script_gets_degrees_with_reasons_and_its_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("--gpus", "512", "--gpu", "h100", "--", *SCRIPT) == 0
    text = capsys.readouterr().out
    assert "174.6" in text and "512 of h100-80gb" in text
    assert "--tensor-model-parallel-size" in text and "does not fit: " in text
    assert "% slower: " in text and "never measured here" in text


def test_json_has_the_best_the_others_and_what_they_rest_on(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--model", llama, "--gpus", "7", "--global-batch-size", "1024", "--json")
    assert run(*words) == 0
    said = json.loads(capsys.readouterr().out)
    best = said["best"]
    assert said["parameters"] == 8_030_261_248 and said["calibrated_by_rows"] == 0
    assert best["tp"] * best["pp"] * best["dp"] * best["cp"] + best["idle"] == 7
    assert best["seconds"] == pytest.approx(sum(best["time"].values()))
    assert best["bytes"] == pytest.approx(sum(best["memory"].values()))
    assert all(one["reason"] for one in said["runners_up"]) and not best["reason"]


def test_a_range_has_a_line_for_each_number_of_devices(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--model", llama, "--range", "1:8", "--gpu", "a100-40gb")
    assert run(*words, "--global-batch-size", "64") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert "nothing that is valid on 1 devices fits" in lines[1]
    assert run(*words, "--global-batch-size", "64", "--json") == 0
    said = json.loads(capsys.readouterr().out)["range"]
    assert [line["gpus"] for line in said] == list(range(1, 9))
    assert "refused" in said[0] and said[7]["best"]["idle"] == 0


def test_a_shape_may_be_stated_in_toml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.toml"
    path.write_text("[model]\nlayers = 4\nhidden = 256\nheads = 4\nseq = 128\nvocab = 1000\n")
    assert run("--model", path, "--gpus", "2", "--global-batch-size", "8", "--json") == 0
    assert json.loads(capsys.readouterr().out)["best"]["idle"] == 0
    path.write_text("[model]\nlayers = 4\nheight = 3\n")
    assert run("--model", path, "--gpus", "2", "--global-batch-size", "8") == 3
    assert "'height' is no size of a model" in capsys.readouterr().err


def test_measured_steps_calibrate_a_plan(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = table(tmp_path / "fit.csv", *TABLE_1)
    words = ("--model", llama, "--gpus", "8", "--global-batch-size", "64", "--calibrate", fit)
    assert run(*words, "--gpu", "a100") == 0
    text = capsys.readouterr().out
    assert "calibrated by 3 measured steps; never measured: " in text
    assert run(*words, "--gpu", "h100") == 3
    assert "says nothing of h100-80gb here; it has sc21 on a100-80gb" in capsys.readouterr().err
    both = table(tmp_path / "both.csv", *TABLE_1, ["other", *TABLE_1[0][1:]])
    of_both = (*words[:-1], both, "--gpu", "a100")
    assert run(*of_both) == 3
    assert "Name one by --source" in capsys.readouterr().err
    assert run(*of_both, "--source", "other") == 0


def test_scores_are_one_object_with_every_row_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = table(tmp_path / "fit.csv", *TABLE_1[:2])
    strange = ["sc21", *TABLE_1[0][1:7], "B9000", *TABLE_1[0][8:]]
    rows = table(tmp_path / "rows.csv", *TABLE_1, ["other", *TABLE_1[0][1:]], strange)
    assert run("--score", rows, "--calibrate", fit, "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    said = json.loads(line)
    names = set(
        "rows error_mean error_max transfer_error_mean interval_coverage interval_half_width "
        "regret_mean regret_max rank_correlation_min".split()
    )
    assert names <= set(said)
    assert (said["rows"], said["rows_known"], said["rows_refused"]) == (5, 3, 1)
    assert said["error_max"] < 0.1 < said["transfer_error_mean"]
    assert sum(group["rows"] for group in said["groups"]) == 5
    assert all(names <= set(group) for group in said["groups"])
    assert run("--score", rows) == 0
    assert "counts as an error: line 6: 'B9000'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        ("--gpus 8 --gpu b9000 --global-batch-size 8", "--tflops: "),
        ("--gpus 8 --global-batch-size 6 --micro-batch-size 4", "Use a global batch of 4 or 8"),
        ("--gpus 8", "--global-batch-size is needed"),
        ("--global-batch-size 8", "give either --gpus N, or --range A:B"),
        ("--gpus 8 --range 1:8 --global-batch-size 8", "give either --gpus N, or --range A:B"),
        ("--gpus 1 --gpu a10 --global-batch-size 8", "the fewest on which it does"),
        ("--gpus 8 --gpu v100 --global-batch-size 8", "has no peak for bf16. Use one of: fp16"),
        ("--gpus 8 --global-batch-size 8 --precision int3", "none of bf16"),
        ("--gpus 8 --global-batch-size 8 --calibrate /nothing.csv", "/nothing.csv is no file"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_way_out(
    llama: Path, words: str, way_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--model", llama, *words.split()) == 3
    captured = capsys.readouterr()
    assert way_out in captured.err and not captured.out


def test_flags_that_contradict_each_other_are_refused(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--gpus", "8", "--model", llama, "--global-batch-size", "8", "--", *SCRIPT) == 3
    assert "either --model PATH" in capsys.readouterr().err
    assert run("--gpus", "8") == 3
    assert run("--gpus", "8", "--global-batch-size", "8", "--", *SCRIPT) == 3
    assert "keep one" in capsys.readouterr().err
    wrong = [*SCRIPT, "--num-attention-heads", "7"]
    assert run("--gpus", "8", "--", *wrong) == 3
    assert "--num-attention-heads 7 does not divide" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["torch_dist", "torch", "scalai"])
def test_a_checkpoint_says_its_model_and_its_batch(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stated: dict[str, Any] = {"num_attention_heads": 2, "seq_length": 4, "global_batch_size": 16}
    checkpoint = convert(gpt(**stated), tmp_path / "saved", layout)
    words = ("--model", tmp_path / "saved", "--gpus", "2", "--json")
    assert run(*words) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["global_batch"] == 16
    parameters = (t for t in checkpoint.placed.collection.tensors if t.name.startswith("param/"))
    assert said["parameters"] == sum(tensor.numel for tensor in parameters)
    assert run(*words, "--global-batch-size", "8") == 0
    assert json.loads(capsys.readouterr().out)["global_batch"] == 8


@pytest.mark.parametrize("layout", ["torch_dist", "torch", "scalai"])
def test_a_checkpoint_that_does_not_say_enough_is_refused_by_what_is_missing(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(gpt(), tmp_path / "saved", layout)
    words = ("--model", tmp_path / "saved", "--gpus", "2", "--global-batch-size", "8")
    assert run(*words) == 3
    text = capsys.readouterr().err
    assert f"({layout}) does not say num_attention_heads" in text
    assert "state the model in TOML under [model]" in text


@pytest.mark.parametrize("layout", ["deepspeed_zero0", "deepspeed_zero1", "safetensors"])
def test_a_checkpoint_with_names_of_its_own_needs_the_config_beside_it(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "saved"
    write(folder, layout, deepspeed_state(), **({"dp": 1} if layout != "safetensors" else {}))
    words = ("--model", folder, "--gpus", "8", "--global-batch-size", "64", "--json")
    assert run(*words) == 3
    assert f"({layout}) does not say what its tensors are parts of" in capsys.readouterr().err
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert run(*words) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 8_030_261_248


def test_a_path_that_says_no_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--gpus", "2", "--global-batch-size", "8", "--model")
    assert run(*words, tmp_path / "nowhere") == 3
    assert "is no file; give a checkpoint's directory, a config.json" in capsys.readouterr().err
    assert run(*words, tmp_path) == 3
    assert "holds no checkpoint of a known layout" in capsys.readouterr().err
    convert(gpt(num_attention_heads=2), tmp_path / "saved", "torch_dist")
    (damaged,) = (tmp_path / "saved").rglob(".metadata")
    damaged.write_bytes(b"no pickle")
    assert run(*words, tmp_path / "saved") == 3
    assert ".metadata" in capsys.readouterr().err
    convert(gpt(num_attention_heads=2), tmp_path / "other", "torch_dist")
    assert run("--gpus", "2", "--model", tmp_path / "other") == 3
    assert "--global-batch-size is needed" in capsys.readouterr().err
