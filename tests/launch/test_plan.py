"""``scalai plan`` says what to take and why, what a change moves and what policies make of devices
that come and go; it ends with 3 and the way out where it cannot."""

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from scalai.launch.cli import main
from support.checkpoints import convert, deepspeed_state, gpt, write

TRACES = Path(__file__).parents[2] / "examples" / "traces"
SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Said:
    """The end of a command: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)

    def refuses(self, way_out: str) -> None:
        assert self.code == 3 and way_out in self.err and not self.out, self


Plan = Callable[..., Said]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """Return a function that runs the command."""

    def run(*words: object) -> Said:
        with pytest.raises(SystemExit) as end:
            main(["plan", *map(str, words)])
        said = capsys.readouterr()
        return Said(int(end.value.code or 0), said.out, said.err)

    return run


def megatron(layers: int, hidden: int, heads: int, length: int, batch: int) -> list[str]:
    """Return a Megatron-LM script with its flags."""
    return (
        f"-- pretrain_gpt.py --num-layers {layers} --hidden-size {hidden} --num-attention-heads "
        f"{heads} --seq-length {length} --max-position-embeddings {length} --global-batch-size "
        f"{batch} --micro-batch-size 1 --bf16 --vocab-size 51200 --use-distributed-optimizer "
        "--sequence-parallel"
    ).split()


GPT3 = megatron(96, 12288, 96, 2048, 1536)
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
OTHER = ["other", *TABLE_1[0][1:]]


def table(path: Path, *rows: list[Any]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return path


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def test_a_script_gets_degrees_with_reasons_and_its_flags(plan: Plan) -> None:
    said = plan("--gpus", "512", "--gpu", "h100", *GPT3)
    for words in ("174.6", "512 of h100-80gb", "--tensor-model-parallel-size", "does not fit: ",
                  "% slower: ", "never measured here"):  # fmt: skip
        assert words in said.out
    assert said.code == 0


def test_json_has_the_best_the_others_and_what_they_rest_on(plan: Plan, llama: Path) -> None:
    said = plan("--model", llama, "--gpus", "7", "--global-batch-size", "1024", "--json").json
    best = said["best"]
    assert said["parameters"] == 8_030_261_248 and said["calibrated_by_rows"] == 0
    assert best["tp"] * best["pp"] * best["dp"] * best["cp"] + best["idle"] == 7
    assert best["seconds"] == pytest.approx(sum(best["time"].values()))
    assert best["bytes"] == pytest.approx(sum(best["memory"].values()))
    assert all(one["reason"] for one in said["runners_up"]) and not best["reason"]


def test_a_range_has_a_line_for_each_number_of_devices(plan: Plan, llama: Path) -> None:
    words = ("--model", llama, "--range", "1:8", "--gpu", "a100-40gb", "--global-batch-size", "64")
    lines = plan(*words).out.splitlines()
    assert len(lines) == 9 and "nothing that is valid on 1 devices fits" in lines[1]
    said = plan(*words, "--json").json["range"]
    assert [line["gpus"] for line in said] == list(range(1, 9))
    assert "refused" in said[0] and said[7]["best"]["idle"] == 0
    assert said[5]["best"]["pp"] == 3, "of 32 layers"
    words = ("--model", llama, "--range", "5:7", "--gpu", "h200", "--global-batch-size", "64")
    said = plan(*words, "--seq-length", "2048", "--json").json["range"]
    assert [line["best"]["dp"] for line in said] == [5, 6, 7]


def test_a_shape_may_be_stated_in_toml(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text("[model]\nlayers = 4\nhidden = 256\nheads = 4\nseq = 128\nvocab = 1000\n")
    words = ("--model", path, "--gpus", "2", "--global-batch-size", "8")
    assert plan(*words, "--json").json["best"]["idle"] == 0
    path.write_text("[model]\nlayers = 4\nheight = 3\n")
    plan(*words).refuses("'height' is no size of a model")


def test_measured_steps_calibrate_a_plan(plan: Plan, llama: Path, tmp_path: Path) -> None:
    fit, both = table(tmp_path / "fit.csv", *TABLE_1), table(tmp_path / "2.csv", *TABLE_1, OTHER)
    words = ("--model", llama, "--gpus", "8", "--global-batch-size", "64", "--calibrate")
    said = plan(*words, fit, "--gpu", "a100")
    assert "calibrated by 3 measured steps; never measured: " in said.out
    plan(*words, fit, "--gpu", "h100").refuses(
        "says nothing of h100-80gb here; it has sc21 on a100-80gb"
    )
    plan(*words, both, "--gpu", "a100").refuses("Name one by --source")
    assert plan(*words, both, "--gpu", "a100", "--source", "other").code == 0


def test_scores_are_one_object_with_every_row_counted(plan: Plan, tmp_path: Path) -> None:
    fit = table(tmp_path / "fit.csv", *TABLE_1[:2])
    strange = ["sc21", *TABLE_1[0][1:7], "B9000", *TABLE_1[0][8:]]
    rows = table(tmp_path / "rows.csv", *TABLE_1, OTHER, strange)
    said = plan("--score", rows, "--calibrate", fit, "--json").json
    names = set(
        "rows error_mean error_max transfer_error_mean interval_coverage interval_half_width "
        "regret_mean regret_max rank_correlation_min".split()
    )
    assert (said["rows"], said["rows_known"], said["rows_refused"]) == (5, 3, 1)
    assert said["error_max"] < 0.1 < said["transfer_error_mean"]
    assert sum(group["rows"] for group in said["groups"]) == 5
    assert all(names <= set(group) for group in (said, *said["groups"]))
    assert "counts as an error: line 6: 'B9000'" in plan("--score", rows).out


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
        ("--gpus 8 --global-batch-size 8 " + " ".join(GPT3), "either --model PATH"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_way_out(
    plan: Plan, llama: Path, words: str, way_out: str
) -> None:
    plan("--model", llama, *words.split()).refuses(way_out)


def test_flags_that_contradict_the_script_are_refused(plan: Plan) -> None:
    plan("--gpus", "8").refuses("either --model PATH")
    plan("--gpus", "8", "--global-batch-size", "8", *GPT3).refuses("keep one")
    wrong = [*GPT3, "--num-attention-heads", "7"]
    plan("--gpus", "8", *wrong).refuses("--num-attention-heads 7 does not divide")


@pytest.mark.parametrize("layout", ["torch_dist", "torch", "scalai"])
def test_a_checkpoint_says_its_model_and_its_batch_or_what_is_missing(
    plan: Plan, layout: str, tmp_path: Path
) -> None:
    stated: dict[str, Any] = {"num_attention_heads": 2, "seq_length": 4, "global_batch_size": 16}
    checkpoint = convert(gpt(**stated), tmp_path / "saved", layout)
    words = ("--model", tmp_path / "saved", "--gpus", "2", "--json")
    said = plan(*words).json
    parameters = (t for t in checkpoint.placed.collection.tensors if t.name.startswith("param/"))
    assert said["parameters"] == sum(tensor.numel for tensor in parameters)
    assert said["global_batch"] == 16
    assert plan(*words, "--global-batch-size", "8").json["global_batch"] == 8
    convert(gpt(), tmp_path / "silent", layout)
    silent = plan("--model", tmp_path / "silent", "--gpus", "2", "--global-batch-size", "8")
    silent.refuses(f"({layout}) does not say num_attention_heads")
    silent.refuses("state the model in TOML under [model]")


@pytest.mark.parametrize("layout", ["deepspeed_zero0", "deepspeed_zero1", "safetensors"])
def test_a_checkpoint_with_names_of_its_own_needs_the_config_beside_it(
    plan: Plan, layout: str, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    write(folder, layout, deepspeed_state(), **({"dp": 1} if layout != "safetensors" else {}))
    words = ("--model", folder, "--gpus", "8", "--global-batch-size", "64", "--json")
    plan(*words).refuses(f"({layout}) does not say what its tensors are parts of")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert plan(*words).json["parameters"] == 8_030_261_248


def test_a_path_that_says_no_model_is_refused(plan: Plan, tmp_path: Path) -> None:
    words = ("--gpus", "2", "--global-batch-size", "8", "--model")
    plan(*words, tmp_path / "nowhere").refuses(
        "is no file; give a checkpoint's directory, a config.json"
    )
    plan(*words, tmp_path).refuses("holds no checkpoint of a known layout")
    convert(gpt(num_attention_heads=2), tmp_path / "saved", "torch_dist")
    plan("--gpus", "2", "--model", tmp_path / "saved").refuses("--global-batch-size is needed")
    (damaged,) = (tmp_path / "saved").rglob(".metadata")
    damaged.write_bytes(b"no pickle")
    plan(*words, tmp_path / "saved").refuses(".metadata")


# ------------------------------------------------------------------ DeepSpeed

BF16 = {"train_batch_size": 256, "bf16": {"enabled": True}}
DeepSpeedPlan = Callable[..., Said]


@pytest.fixture
def of_deepspeed(plan: Plan, tmp_path: Path) -> DeepSpeedPlan:
    """Return a function that plans a DeepSpeed script by its configuration, beside a model."""

    def run(config: dict[str, Any], *script: str, flags: tuple[str, ...] = ()) -> Said:
        model, path = tmp_path / "model.toml", tmp_path / "ds.json"
        model.write_text("[model]\nlayers = 24\nhidden = 2048\nheads = 16\nseq = 2048\nvocab = 512")
        path.write_text(json.dumps(config))
        given = ("--gpus", "16", "--gpu", "a100", "--model", model, "--json", *flags)
        return plan(*given, "--", "train.py", "--deepspeed_config", path, *script)

    return run


def test_a_plain_deepspeed_script_is_replicated_alone(of_deepspeed: DeepSpeedPlan) -> None:
    found = of_deepspeed({**BF16, "zero_optimization": {"stage": 2}}).json
    layouts = [found["best"], *found["runners_up"]]
    assert {(each["tp"], each["pp"], each["vpp"]) for each in layouts} == {(1, 1, 1)}
    assert found["global_batch"] == 256 and found["best"]["sharding"] == 2
    assert "zero_optimization.stage=2" in found["flags"]


def test_autotp_and_stages_are_those_that_deepspeed_takes(of_deepspeed: DeepSpeedPlan) -> None:
    cut = {**BF16, "tensor_parallel": {"autotp_size": 2}}
    found = of_deepspeed(cut, "--num-stages", "2", flags=("--sharding", "1,3")).json
    assert found["global_batch"] == 128, "AutoTP's ranks count as replicas"
    layouts = [found["best"], *found["runners_up"]]
    for each in layouts:
        assert each["tp"] == 1 or each["pp"] == 1
        assert each["sharding"] == 1 or each["pp"] == 1
    assert len({each["tp"] for each in layouts}) > 1


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
def test_a_deepspeed_configuration_that_contradicts_or_lacks_is_refused(
    of_deepspeed: DeepSpeedPlan, config: dict[str, Any], flags: tuple[str, ...], why: str
) -> None:
    of_deepspeed(config, flags=flags).refuses(why)


def test_a_deepspeed_script_alone_does_not_say_its_model(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(BF16))
    plan("--gpus", "8", "--", "train.py", "--deepspeed", path).refuses("state it by --model too")


# ------------------------------------------------------------------ the cost of a change

XL = ("--gpu", "a100"), megatron(24, 2048, 16, 1024, 96)
SMALLER = ("--from", "tp4 pp4 dp2", "--to", "tp2 pp4 dp3")


@pytest.fixture
def change(plan: Plan) -> Plan:
    return lambda *words: plan(*XL[0], *words, *XL[1])


def test_a_change_is_told_by_bytes_pairs_and_phases(change: Plan) -> None:
    said = change(*SMALLER, "--relaunch", "12.5")
    for words in ("TP4·PP4·DP2", "to TP2·PP4·DP3", "as given", "cross between hosts (",
                  "in the order of joining)", "relaunch 12.5 s", " -> host-"):  # fmt: skip
        assert words in said.out
    to, pairs = (change(*SMALLER, "--json").json[name] for name in ("to", "pairs"))
    assert sum(pair["bytes"] for pair in pairs) == to["moves"] <= to["unplaced_moves"]
    assert sum(to["seconds"].values()) - to["beside_s"] == pytest.approx(to["total_s"])
    assert sum(host["ranks"] for host in to["hosts"]) == 24 and to["missing"] == 0
    assert not any(pair["from"] == pair["to"] for pair in pairs)


def test_what_to_change_to_is_computed_where_nobody_says_it(change: Plan) -> None:
    said = change("--from", "tp2 pp2 dp2", "--gpus", "7", "--residence", "1e6", "--json").json
    to = said["to"]
    assert to["tp"] * to["pp"] * to["dp"] + to["idle"] == 7
    assert said["pairs"] == [] and to["moves"] == 0  # one host
    assert said["others"] and all(other["reason"] for other in said["others"])


def test_for_a_moment_nothing_changes_and_no_time_is_not_the_usual_time(
    change: Plan, tmp_path: Path
) -> None:
    picture = tmp_path / "stays.svg"
    words = ("--from", "tp2 pp2 dp4", "--gpus", "16", "--residence", "1", "--picture", picture)
    assert "nothing changes: no byte moves" in change(*words).out
    assert "nothing changes" in picture.read_text()
    said = change("--from", "tp8 pp2 dp1", "--gpus", "16", "--residence", "0", "--json").json
    assert said["to"]["is_stay"] and said["residence_s"] == 0


def test_the_picture_has_every_rank_every_flow_and_what_is_lost(
    change: Plan, tmp_path: Path
) -> None:
    path = tmp_path / "change.svg"
    words = (*SMALLER, "--lost", "host-1", "--picture", path)
    pairs = change(*words, "--json").json["pairs"]
    assert "held by no host that is left" in change(*words).out
    root = ElementTree.fromstring(path.read_text())
    squares = [one for one in root.iter(f"{SVG}rect") if one.find(f"{SVG}title") is not None]
    assert len(squares) == 32 + 24
    titles = [str(one.findtext(f"{SVG}title")) for one in root.iter(f"{SVG}path")]
    for pair in pairs:
        assert any(title.startswith(f"{pair['from']} to {pair['to']} ") for title in titles)
    words_drawn = " ".join("".join(one.itertext()) for one in root.iter(f"{SVG}text"))
    assert "host-1, ranks 8 to 15, lost" in words_drawn and "takes" in words_drawn
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for one in root.iter(f"{SVG}rect"):
        assert 0 <= float(one.get("x", "0")) <= width - float(one.attrib["width"])
        assert 0 <= float(one.get("y", "0")) <= height - float(one.attrib["height"])


def test_lines_of_a_host_lie_side_by_side_and_begin_at_its_squares(
    change: Plan, tmp_path: Path
) -> None:
    path = tmp_path / "change.svg"
    words = ("--per-host", "4", "--from", "tp4 pp4 dp2", "--to", "tp4 pp3 dp1", "--picture", path)
    assert change(*words).code == 0
    root = ElementTree.fromstring(path.read_text())
    ends: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for one in root.iter(f"{SVG}path"):
        x, y, *_, last = one.attrib["d"].removeprefix("M").split()
        width = float(one.attrib["stroke-width"])
        assert float(x) == 20 + 4 * 18 + 4
        says = str(one.findtext(f"{SVG}title")).replace(" keeps ", " to ").split()
        ends.setdefault(("from", says[0]), []).append((float(y), width))
        if says[2].startswith("host"):
            ends.setdefault(("to", says[2]), []).append((float(last), width))
    assert max(len(lines) for lines in ends.values()) > 1
    for lines in ends.values():
        for (above, upper), (below, lower) in pairwise(sorted(lines)):
            assert below - above >= (upper + lower) / 2 - 0.5, "0.5 is the thinnest line"
        assert sum(width for _, width in lines) <= 16.5


def test_a_large_picture_says_what_it_leaves_out(change: Plan, tmp_path: Path) -> None:
    path = tmp_path / "large.svg"
    assert change("--from", "tp8 pp6 dp6", "--to", "tp8 pp6 dp4", "--picture", path).code == 0
    text = path.read_text()
    assert "12 more hosts are not drawn" in text and text.count("<path") <= 80


RUNS = ("--from", "tp2 pp2 dp2")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--to", "tp1 pp1 dp1", "--gpus", "1"), "say what runs, by --from"),
        (("--residence", "60", "--gpus", "8"), "--residence is about a change; say what runs"),
        (("--relaunch", "0", "--gpus", "8"), "--relaunch is about a change; say what runs"),
        ((*RUNS, "--trace", "a.csv"), "--score and --trace"),
        (("--from", "tp2 pp2"), "does not say dp; write for example"),
        (RUNS, "give --gpus N"),
        (("--from", "two", "--gpus", "8"), "write for example 'tp2 pp1'"),
        (("--from", "tp3 pp1 dp1", "--gpus", "8"), "tp=3 does not divide num_attention_heads=16"),
        ((*RUNS, "--to", "tp5 pp1 dp1"), "On 5 devices TP"),
        ((*RUNS, "--to", "tp2 pp2 dp4", "--gpus", "8"), "use --gpus 16"),
        ((*RUNS, "--gpus", "8", "--lost", "host-7"), "name some of these"),
        ((*RUNS, "--range", "1:8"), "leave out --range"),
        ((*RUNS, "--gpus", "8", "--picture", "a.png"), "ends in .svg"),
        ((*RUNS, "--gpus", "8", "--picture", "/nowhere/a.svg"), "another file"),
    ],
)
def test_a_change_that_cannot_be_is_refused_with_the_way_out(
    change: Plan, words: tuple[str, ...], says: str
) -> None:
    said = change(*words)
    assert said.code == 3 and says in said.err
    assert change(*RUNS, "--gpus", "8", "--residence", "soon").code == 2


# ------------------------------------------------------------------ a trace of devices

MODEL = "[model]\nlayers = 12\nhidden = 768\nheads = 12\nseq = 512\nvocab = 50304\n"
EVENTS = "time_min,gpus,kind\n0,16,\n35,8,planned\n70,4,failure\n105,0,\n110,7,\n150,,end\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.toml"
    path.write_text(MODEL)
    return path


@pytest.fixture
def replayed(plan: Plan, model: Path) -> Plan:
    """Return a function that replays events."""

    def run(events: str, *words: str) -> Said:
        path = model.with_name("t.csv")
        path.write_text(events)
        given = ("--model", model, "--global-batch-size", "64", "--gpu", "a100-40gb")
        return plan("--trace", path, *given, *words)

    return run


@pytest.mark.parametrize(
    ("events", "words", "way_out"),
    [
        ("", "", "It needs a header such as time_min,gpus,kind"),
        ("time_min,gpus\n0,8\n0,4\n", "", "sort the lines by time"),
        (EVENTS, "--gpus 8", "leave out --gpus"),
        (EVENTS, "--until 200", "leave out --until"),
        (EVENTS, "--start tp5", "Give other degrees for 16"),
        (EVENTS, "--start tp4,pp4,dp2", "they need 32 devices"),
        (EVENTS, "--degrees 8=tp4 --degrees 8=tp2", "two entries for 8 devices"),
        (EVENTS, "--degrees 8=tp4,pp4", "they need 16 devices at least"),
        (EVENTS, "--degrees 8=tp2,mbs7", "Give other degrees for 8"),
        (EVENTS, "--micro-batch-size 7", "Use a global batch of"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_the_way_out(
    replayed: Plan, events: str, words: str, way_out: str
) -> None:
    replayed(events, *words.split()).refuses(way_out)


@pytest.mark.parametrize("words", ["--until 90", "--start tp2", "--degrees 8=tp2",
                                   "--checkpoint-every 5", "--storage-gb-s 2"])  # fmt: skip
def test_flags_of_a_trace_without_one_are_refused(plan: Plan, model: Path, words: str) -> None:
    given = ("--model", model, "--global-batch-size", "64", "--gpus", "8")
    plan(*given, *words.split()).refuses(f"{words.split()[0]} is about a trace; name it")


@pytest.mark.parametrize(("name", "way_out"), [("none", "is no file"), ("raw", "cannot be read")])
def test_a_trace_that_is_no_file_or_no_text_is_refused(
    plan: Plan, model: Path, name: str, way_out: str
) -> None:
    path = model.with_name(name)
    model.with_name("raw").write_bytes(b"\xff\xfe\x00time")
    plan("--model", model, "--global-batch-size", "64", "--trace", path).refuses(way_out)
    assert plan("--trace", path, "--relaunch", "-1").code == 2


def test_where_nothing_ever_fits_the_nearest_that_does_is_named(
    replayed: Plan, model: Path
) -> None:
    large = MODEL.replace("12\nhidden = 768", "96\nhidden = 12288").replace("12\nseq", "96\nseq")
    model.write_text(large)
    replayed("time_min,gpus\n0,2\n9,1\n20,0\n").refuses("the fewest on which it does")


def test_a_policy_has_its_steps_and_where_all_time_went(replayed: Plan) -> None:
    words = ("--start", "tp2,pp2", "--degrees", "16=tp2,pp2", "--degrees", "4=tp4", "--json")
    said = replayed(EVENTS, *words, "--checkpoint-every", "60").json
    assert set(said["policies"]) == {"ours", "dp-only", "fixed", "checkpoint", "table"}
    assert said["seconds"] == 150 * 60 and not said["end_is_assumed"]
    for policy in said["policies"].values():
        assert 0 < policy["steps"] <= said["ideal_steps"]
        assert policy["goodput"] == pytest.approx(policy["steps"] / said["ideal_steps"])
        assert policy["useful_s"] + sum(policy["lost_s"].values()) == pytest.approx(9000)
        assert policy["lost_s"]["waiting"] >= 300  # there is no device for 5 minutes
        assert policy["timeline"][-1]["end_s"] == 9000
    ours, fixed = said["policies"]["ours"], said["policies"]["fixed"]
    # 16 devices are never there again: fixed degrees wait ever after.
    assert fixed["lost_s"]["waiting"] == pytest.approx(115 * 60)
    assert ours["steps"] > fixed["steps"] and ours["lost_s"]["redone"] < 300
    assert said["policies"]["checkpoint"]["lost_s"]["redone"] > 1800


def test_the_table_names_every_policy_and_what_is_assumed(replayed: Plan) -> None:
    text = replayed("time_min,gpus\n0,8\n40,3\n80,8\n").out
    for word in ("ours", "dp-only", "fixed", "checkpoint", "always the best at no cost", "--until"):
        assert word in text


def test_more_devices_than_any_layout_takes_are_idle(replayed: Plan) -> None:
    ours = replayed("time_min,gpus\n0,100000\n40,0\n", "--json").json["policies"]["ours"]
    assert ours["goodput"] == pytest.approx(1)
    used = ours["timeline"][0]["gpus"] - ours["idle_device_s"] / 2400
    assert 0 < used <= 64 * 12 * 12


def test_what_is_given_counts(replayed: Plan) -> None:
    def lost(*words: str) -> dict[str, float]:
        said = replayed(EVENTS, "--json", *words).json
        return dict(said["policies"]["checkpoint"]["lost_s"])

    usual = lost("--relaunch", "10")
    assert lost("--relaunch", "100")["reconfiguration"] > usual["reconfiguration"] + 200
    often = lost("--relaunch", "10", "--checkpoint-every", "1")
    assert often["redone"] < 60 < usual["redone"]
    slow = lost("--relaunch", "10", "--storage-gb-s", "0.1")
    assert slow["reconfiguration"] > usual["reconfiguration"]


def test_the_published_trace_is_one(plan: Plan) -> None:
    said = plan(
        "--trace", TRACES / "tenplex.csv", "--model", TRACES / "tenplex.toml", "--gpu", "a6000",
        "--global-batch-size", "128", "--precision", "fp16", "--source", "tenplex", "--json",
        "--calibrate", TRACES / "tenplex_steps.csv",
    ).json  # fmt: skip
    assert said["seconds"] == 538 * 60 and len(said["events"]) == 16
    assert said["calibrated_by_rows"] == 3
