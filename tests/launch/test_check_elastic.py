"""Reports before training starts: every world of a job, and what this host lacks."""

import json
import os
import re
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from scalai.core.errors import RefusedError
from scalai.launch.cli import main
from scalai.launch.commands.check_elastic import check_elastic
from scalai.launch.config.elastic_config import ElasticConfig, load_config
from scalai.launch.config.flags import parse_options

GPT = (
    "pretrain_gpt.py --num-layers 4 --num-attention-heads 4 --micro-batch-size 1 "
    "--global-batch-size 12 --tensor-model-parallel-size 2"
)
EXAMPLES = Path(__file__).parents[2] / "configs"


def check(flags: str, config: ElasticConfig | None = None, slots: int = 4) -> str:
    options = parse_options(["--check-elastic", *flags.split()])
    config = config or load_config(options.elastic, options.overrides)
    return str(check_elastic(options, config, slots))


def rows(report: str) -> dict[str, list[str]]:
    """Return what is said of each world; of several that have one line, of each the same, but for
    DP where it grows."""
    table = report.split("\n\n")[-1].splitlines()[1:]
    found: dict[str, list[str]] = {}
    for line in table:
        name, *said = line.split(maxsplit=3)
        first, _, last = name.partition("-")
        names = range(int(first), int(last or first) + 1) if last.isdigit() or not last else [name]
        found |= {str(each): said for each in names}
        if growing := re.search(r"DP(\d+)-(\d+)", said[0]):
            least, most = map(int, growing.groups())
            for place, each in enumerate(names):
                dp = least + place * (most - least + 1) // len(names)
                found[str(each)] = [said[0].replace(growing[0], f"DP{dp}"), *said[1:]]
    return found


def test_every_world_is_reported_with_degrees_idle_ranks_and_the_reason() -> None:
    found = rows(check(f"--nnodes 1:2 {GPT}"))
    assert list(found) == [str(world) for world in range(1, 9)]
    assert found["4"][:2] == found["5"][:2] == ["TP2·PP1·DP2", "0-1"]
    assert found["4"][2].startswith("initial degrees; rank 6 idle (7 is not a multiple of 2")
    assert found["8"] == ["TP2·PP1·DP4", "0", "initial degrees"]
    assert found["1"][:2] == ["none", "all"]
    assert "TP2·PP1 does not fit on 1 rank" in found["1"][2]


def test_rows_that_repeat_are_one_with_all_worlds_and_the_reason_for_what_idles() -> None:
    flags = GPT.replace("size 12", "size 64").replace("--num-layers 4", "--num-layers 7")
    report = check(f"--nnodes 1:300 {flags} --pipeline-model-parallel-size 3", slots=8)
    table = [line.split(maxsplit=3) for line in report.split("\n\n")[-1].splitlines()[1:]]
    assert [row[:3] for row in table[:4]] == [
        ["1-5", "none", "all"],
        ["6-47", "TP2·PP3·DP1-7", "0-5"],
        ["48-59", "TP2·PP3·DP8", "0-11"],
        ["60-65", "TP2·PP3·DP10", "0-5"],
    ]
    assert "ranks 42 to 46 idle (47 is not a multiple of 6)" in table[1][3]
    assert "ranks 48 to 58 idle (DP9 would need as many passes as DP8)" in table[2][3]
    assert table[-1][:3] == ["384-2400", "TP2·PP3·DP64", "0-2016"], "beyond 1,024 by whole hosts"
    assert "micro_batch_size*dp=1*400 is more than global_batch_size=64" in table[-1][3]


def test_only_allowed_worlds_are_reported() -> None:
    assert list(rows(check(f"--allowed-sizes 2,4 --nnodes 1:2 {GPT}"))) == ["2", "4"]
    assert list(rows(check(f"--nnodes 1 --allowed-sizes 4,7 {GPT}"))) == ["4", "7"]


def test_rules_for_a_change_have_lines_of_their_own() -> None:
    found = rows(check(f"--elastic {EXAMPLES / 'elastic_gpt_tiny.toml'}", slots=2))
    assert {world: row[0] for world, row in found.items()} == {
        "1": "TP1·PP1·DP1",
        "2": "TP1·PP2·DP1",
        "3": "TP1·PP1·DP3",
        "4": "TP2·PP1·DP2",
        "2->4": "TP2·PP2·DP1",
    }


def test_the_configuration_and_the_limits_are_printed() -> None:
    report = check(GPT)
    for words in (
        "resize.settle_s = 2.0  (default)",
        "num_attention_heads=4",
        "--padded-vocab-size",
    ):
        assert words in report


@pytest.mark.parametrize(
    ("flags", "slots", "words"),
    [
        (f"--elastic {{}} {GPT}", 4, r'\[degrees\] "3" cannot be used .*tp=3'),
        (f"{GPT} --micro-batch-size 5", 4, r"flags ask for TP2·PP1·MBS5.*5.1 does not divide"),
        (f"{GPT} --tensor-model-parallel-size 4", 2, "no world has valid degrees"),
        (f"{GPT} --inprocess-restart", 4, "--inprocess-restart"),
        (f"--nnodes 1 --allowed-sizes 5,7 {GPT}", 4, "1 hosts of 4 workers are 4 at most"),
        (f"--nnodes 1:2 --replicas 5 {GPT}", 4, r"--replicas 5: .*Use 1\."),
    ],
    ids=["an entry that cannot be used", "no valid micro-batch", "no valid world",
         "not elastic", "worlds that the hosts never make", "more replicas than other hosts"],
)  # fmt: skip
def test_what_would_surprise_later_is_refused(
    flags: str, slots: int, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "elastic.toml"
    path.write_text('[degrees]\n3 = "tp3"\n')
    with pytest.raises(RefusedError, match=words):
        check(flags.format(path), slots=slots)


def test_what_may_change_and_what_stays_is_said_with_the_reason() -> None:
    report = check(f"{GPT} --tensor-model-parallel-size 1")
    assert "may change: tp 1, 2, 4; pp 1, 2, 4; dp 1 to 4" in report
    assert "stays: cp 1 (another split of sequences is not supported)" in report
    report = check(f"{GPT} --tensor-model-parallel-size 1 --optimizer muon")
    assert "may change: pp 1, 2, 4; dp 1 to 4" in report
    assert "stays: tp 1 (--muon-tp-mode blockwise" in report
    one = GPT.replace("--num-layers 4", "--num-layers 1").replace("size 12", "size 1")
    assert "may change: nothing, on these worlds" in check(one, slots=2)


def test_an_evaluation_without_a_stated_batch_is_named() -> None:
    schedule = GPT.replace("--global-batch-size 12", "--step-batch-size-schedule 0:12")
    assert "--eval-global-batch-size states them" in check(schedule)
    assert "--eval-global-batch-size" not in check(GPT)


def test_it_is_said_what_of_the_passes_may_change_and_when(tmp_path: Path) -> None:
    path = tmp_path / "elastic.toml"
    assert "may change: recompute, where nothing fits into memory as the flags have it" in check(
        GPT
    )
    split = "--bf16 --use-distributed-optimizer"
    assert (
        "may change: offload to optimizer-half or optimizer, where nothing fits into memory without"
    ) in check(f"{GPT} {split}")
    assert "stays: offload (it needs --use-distributed-optimizer)" in check(GPT)
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert "stays: recompute full (nothing else keeps less in memory)" in check(f"{GPT} {full}")
    path.write_text('[planner]\nmay_change = ["micro-batch"]\nmemory_may_change = []\n')
    free = check(f"--elastic {path} {GPT}")
    assert "may change: micro-batch, wherever that is computed to be faster" in free
    assert "recompute, where" not in free
    masked = check(f"--elastic {path} {GPT} --eod-mask-loss")
    assert "stays: micro-batch (--eod-mask-loss leaves tokens out of the loss" in masked


def test_a_world_on_which_nothing_fits_is_shown_with_what_is_recomputed(tmp_path: Path) -> None:
    large = (
        "pretrain_gpt.py --num-layers 64 --hidden-size 5120 --num-attention-heads 40 "
        "--seq-length 2048 --max-position-embeddings 2048 --padded-vocab-size 51200 --bf16 "
        "--micro-batch-size 4 --global-batch-size 64 --use-distributed-optimizer "
        "--tensor-model-parallel-size 8"
    )
    path = tmp_path / "elastic.toml"
    path.write_text('[planner]\ngpu = "a100-80gb"\nkind = "cost"\n')
    found = rows(check(f"--elastic {path} --nnodes 1:8 {large}", slots=8))
    assert "recompute none -> full" in found["8"][2]
    assert "recompute" not in found["64"][2]
    assert "nothing fits in 85.2 GB without it: the optimizer's " in found["4"][2]


def test_it_is_said_who_chooses_degrees(tmp_path: Path) -> None:
    model = "--hidden-size 256 --seq-length 64 --padded-vocab-size 512"
    kept = check(f"{GPT} {model}")
    assert "planner: degrees are kept, or those of [degrees]: no device is known" in kept
    path = tmp_path / "elastic.toml"
    path.write_text('[planner]\ngpu = "a100-80gb"\n')
    auto = check(f"--elastic {path} --nnodes 1:2 {GPT} {model}")
    assert "planner: degrees are kept until the job has measured steps at 2 of them" in auto
    assert rows(auto)["8"][0] == "TP2·PP1·DP4"
    cost = check(f"--elastic {path} --planner cost --nnodes 1:2 {GPT} {model}")
    assert "planner: degrees are computed for a100-80gb" in cost
    assert "by cost" in rows(cost)["8"][2]
    assert int(rows(cost)["1"][1]) == 0, "what fits in memory is computed, not what ran"


# ------------------------------------------------------------------ scalai doctor


def doctor(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *argv])
    return ended.value.code, capsys.readouterr().out


@pytest.mark.fault
def test_a_host_that_can_run_a_job_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_batch_size": 12, "scalai": {}}))
    flags = ["--nproc-per-node", "4", "train.py", "--deepspeed_config", str(config)]
    code, report = doctor(capsys, "--store-dir", str(tmp_path), "--", *flags)
    assert code == 0, report
    assert f"free in {tmp_path}" in report
    assert "deepspeed" in report and ", hooked: tried" in report
    assert "1-4  TP1·PP1·DP1-4" in report
    assert "mount  " in report
    code, report = doctor(capsys, "--store-dir", str(tmp_path), "--json", "--", *flags)
    found = json.loads(report)
    assert code == 0 and found["is_ready"] is True
    assert "mount" in {each["name"] for each in found["findings"]}


@pytest.mark.fault
def test_what_is_in_the_way_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, report = doctor(capsys, "--", "train.py", "--deepspeed")
    assert code == 3
    assert "no  job            not elastic: no --elastic, and no DeepSpeed configuration" in report
    packages = tmp_path / "deepspeed-0.9.0.dist-info"
    packages.mkdir()
    (packages / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.9.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, report = doctor(capsys)
    assert code == 3
    assert "no  deepspeed      0.9.0, not hooked: deepspeed 0.9.0 was never tried" in report


@pytest.mark.fault
def test_a_lock_that_a_killed_build_left_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that was killed, one that runs, and one that may: torch's own locks."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    batons = {}
    for name in ("killed", "running", "young"):
        (tmp_path / name).mkdir()
        batons[name] = FileBaton(str(tmp_path / name / "lock"))
        assert batons[name].try_acquire()
    for name in ("killed", "young"):
        descriptor = batons[name].fd
        assert descriptor is not None
        os.close(descriptor)
    for name in ("killed", "running"):
        os.utime(tmp_path / name / "lock", (0, 0))
    code, report = doctor(capsys)
    assert code == 3
    lines = [line for line in report.splitlines() if " extensions " in line]
    assert [line.split()[0] for line in lines] == ["no", "ok", "ok"]
    assert f"{tmp_path}/killed/lock" in lines[0] and "remove it" in lines[0]
    assert f"process {os.getpid()} builds" in lines[1]
    (tmp_path / "killed" / "lock").unlink()
    batons["running"].release()
    assert doctor(capsys)[0] == 0


@pytest.mark.fault
def test_a_store_that_cannot_be_written_or_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, report = doctor(capsys, "--store-dir", str(tmp_path / "store"))
    assert f"free in {tmp_path} ({tmp_path}/store is not there yet, and will be made)" in report
    assert not list(tmp_path.iterdir()), "it only looks"
    (file := tmp_path / "file").touch()
    for above in (Path("/proc"), file):
        code, report = doctor(capsys, "--store-dir", str(above / "nosuch"))
        assert code == 3 and f"no  shared memory  no folder can be made in {above} (" in report


@pytest.mark.fault
def test_a_store_that_is_not_ones_own_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    store.chmod(0o777)
    code, report = doctor(capsys, "--store-dir", str(store))
    assert code == 3 and "no  shared memory" in report
    assert f"{store} may be written to by other users" in report
    store.chmod(0o1777)
    assert "may take the store away" not in doctor(capsys, "--store-dir", str(store))[1]
    tmp_path.chmod(0o777)
    assert "may take the store away" in doctor(capsys, "--store-dir", str(store))[1]


def test_the_report_is_json_for_machines() -> None:
    options = parse_options(["--check-elastic", "--nnodes", "1:2", *GPT.split()])
    config = load_config(options.elastic, options.overrides)
    report = json.loads(json.dumps(check_elastic(options, config, 4).to_json()))
    four = next(each for each in report["worlds"] if each["ranks"][0] <= 4 <= each["ranks"][1])
    assert four["degrees"]["tp"] * four["degrees"]["pp"] * four["degrees"]["dp"] >= 4
    assert any("may change" in line for line in report["changes"]) and report["notes"]
