"""Flags: torchrun's own in both spellings, ours beside them, and --elastic on either side."""

import argparse
import json
from collections.abc import Sequence

import pytest
from torch.distributed.run import get_args_parser

from scalai.core.errors import UsageError
from scalai.launch import cli
from scalai.launch.config import flags as flags_module
from scalai.launch.config.flags import build_parser, parse_options, with_own_name
from scalai.launch.config.options import Options
from scalai.launch.config.removed import REMOVED

FLAGS = [name for name in REMOVED if name.startswith("--") and " " not in name]


def parse(*argv: str) -> Options:
    return parse_options(argv)


def test_torchruns_flags_mean_what_they_mean_there() -> None:
    options = parse(
        "--nnodes", "1:4", "--nproc_per_node", "8", "--rdzv-endpoint", "head:29400",
        "--rdzv_id", "gpt", "--max-restarts", "3", "--tee", "3", "train.py", "--lr", "1e-3",
    )  # fmt: skip
    assert (options.min_nodes, options.max_nodes) == (1, 4)
    assert (options.nproc_per_node, options.max_restarts, options.tee) == ("8", 3, "3")
    assert (options.coordinator, options.job) == ("head:29400", "gpt")
    assert (options.script, options.script_args) == ("train.py", ("--lr", "1e-3"))
    assert options.elastic is None
    assert options.overrides == {}


def test_restarts_that_are_not_given_are_told_from_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("t.py").max_restarts is None
    assert parse("--max-restarts", "0", "t.py").max_restarts == 0
    monkeypatch.setenv("PET_MAX_RESTARTS", "0")
    assert parse("t.py").max_restarts == 0


@pytest.mark.fault
def test_each_standalone_job_has_a_name_of_its_own_unless_it_is_given_one() -> None:
    first, second = (parse(*with_own_name(["--standalone", "t.py", "--job", "x"])) for _ in "ab")
    assert first.job != second.job
    assert first.is_standalone and first.script_args == ("--job", "x")
    assert parse(*with_own_name(["--standalone", "--job", "mine", "t.py"])).job == "mine"
    assert parse(*with_own_name(["t.py"])).job == "default"


@pytest.mark.parametrize(
    ("argv", "other"),
    [
        (["--coordinator", "head:1"], ["--rdzv-endpoint=head:1"]),
        (["--job", "gpt"], ["--rdzv_id", "gpt"]),
        (["--store-dir", "x"], ["--store_dir=x"]),
        (["--drain-timeout", "3"], ["--drain_timeout_s", "3"]),
        (["--nproc-per-node=2"], ["--nproc_per_node", "2"]),
    ],
)
def test_spellings_are_equal(argv: Sequence[str], other: Sequence[str]) -> None:
    assert parse(*argv, "train.py") == parse(*other, "train.py")


@pytest.mark.parametrize(
    "argv",
    [
        ("--elastic", "e.toml", "train.py", "--lr", "1"),
        ("--elastic=e.toml", "train.py", "--lr", "1"),
        ("train.py", "--elastic", "e.toml", "--lr", "1"),
        ("train.py", "--lr", "1", "--elastic=e.toml"),
    ],
)
def test_elastic_may_stand_before_the_script_or_among_its_arguments(argv: Sequence[str]) -> None:
    options = parse(*argv)
    assert (options.elastic, options.script_args) == ("e.toml", ("--lr", "1"))


def test_our_other_flags_behind_the_script_are_the_scripts() -> None:
    options = parse("train.py", "--store-dir", "x", "--job", "y", "--nnodes", "3")
    assert options.script_args == ("--store-dir", "x", "--job", "y", "--nnodes", "3")
    assert options.job == "default"


def test_flags_overrule_the_configuration_by_dotted_name() -> None:
    options = parse(
        "--store-dir", "/mem", "--durable-dir", "/disk", "--settle-s", "1.5", "--drain-timeout",
        "9", "--allowed-sizes", "2,4,6-8", "--probe", "file:/run/n", "--snapshot-every", "10",
        "--min-model-parallel", "2", "--store-budget-gb", "3", "train.py",
    )  # fmt: skip
    assert options.overrides == {
        "store.dir": "/mem",
        "store.durable_dir": "/disk",
        "store.budget_gb": 3.0,
        "store.snapshot_every": 10,
        "resize.settle_s": 1.5,
        "resize.drain_timeout_s": 9.0,
        "resize.allowed_sizes": (2, 4, 6, 7, 8),
        "resize.min_model_parallel": 2,
        "probe.kind": "file",
        "probe.file": "/run/n",
    }


@pytest.mark.parametrize("text", ["often", "-1", "1.5", ""])
def test_steps_between_snapshots_are_a_number_or_chosen(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = parse("--snapshot-every", "auto", "t.py")
    assert chosen.overrides == {"store.snapshot_every": "auto"}
    with pytest.raises(SystemExit):
        parse(f"--snapshot-every={text}", "t.py")
    assert "neither a number of steps nor auto" in capsys.readouterr().err


@pytest.mark.parametrize("flag", FLAGS)
def test_a_removed_flag_is_refused_by_name_with_the_way_out(flag: str) -> None:
    for said in ([flag, "value"], [f"{flag}=value"], [flag]):
        with pytest.raises(UsageError, match=f"^{flag} is not known any more") as refused:
            parse(*said, "t.py")
        assert REMOVED[flag] in str(refused.value)
    assert parse("t.py", flag, "value").script_args == (flag, "value"), "the script's own"
    assert flag not in build_parser().format_help()


@pytest.mark.parametrize("name", [name for name in REMOVED if name.startswith("SCALAI_")])
def test_a_removed_variable_is_refused_by_name_with_the_way_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "value")
    with pytest.raises(UsageError, match=f"^{name} is not known any more"):
        parse("t.py")
    with pytest.raises(SystemExit) as ended:
        cli.main(["status"])
    assert ended.value.code == 2


def test_a_coordinator_is_told_what_was_read() -> None:
    options = parse("--allowed-sizes", "2,4", "--settle-s", "1", "--nnodes", "1:4", "t.py", "--lr")
    reported = json.loads(json.dumps(options.to_json()))
    assert Options.from_json(reported) == options
    for wrong in ({"min_nodes": "1"}, {"nodes": 1}, {"script_args": 3}):
        with pytest.raises(UsageError, match="Do the versions differ"):
            Options.from_json(reported | wrong)


@pytest.mark.fault
def test_where_the_coordinator_is() -> None:
    assert parse("train.py").coordinator is None
    assert parse("--nnodes", "2", "--master-addr", "h", "t.py").coordinator == "h:29500"
    assert parse("--master-addr", "fe80::1", "t.py").coordinator == "[fe80::1]:29500"
    assert parse("--master-addr", "[::1]", "--master-port", "1", "t.py").coordinator == "[::1]:1"
    assert parse("--master-addr", "h", "--master-port", "7", "t.py").coordinator == "h:7"
    assert parse("--standalone", "--rdzv-endpoint", "h:7", "t.py").coordinator is None


def test_a_module_may_stand_for_the_script() -> None:
    options = parse("-m", "package.train", "--lr", "1")
    assert (options.is_module, options.script) == (True, "package.train")


def test_a_check_needs_no_script_but_takes_one() -> None:
    assert parse("--check-elastic", "--elastic", "e.toml").script is None
    options = parse("--check-elastic", "pretrain_gpt.py", "--num-layers", "4")
    assert (options.script, options.script_args) == ("pretrain_gpt.py", ("--num-layers", "4"))
    with pytest.raises(UsageError, match="no training script"):
        parse("--elastic", "e.toml")


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--elastic", "a", "t.py", "--elastic", "b"], "given twice"),
        (["t.py", "--elastic", "a", "--elastic=b"], "given twice"),
        (["t.py", "--elastic"], "needs the path"),
        (["--no-python", "t.sh"], "Python program"),
        (["--rdzv-backend", "etcd", "t.py"], "--coordinator HOST:PORT"),
        (["--nnodes", "4:2", "t.py"], "1 <= MIN <= MAX"),
        (["--nnodes", "many", "t.py"], "neither N nor MIN:MAX"),
        (["--max-restarts", "-1", "t.py"], "negative"),
        (["--virtual-local-rank", "t.py"], "not supported"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_way_out(argv: Sequence[str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse(*argv)


@pytest.mark.parametrize("flag", ["--allowed-sizes=2,x", "--allowed-sizes=0", "--probe=guess"])
def test_a_malformed_flag_ends_with_the_code_for_wrong_usage(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(flag, "t.py")
    assert ended.value.code == 2
    assert flag.split("=")[0] in capsys.readouterr().err


@pytest.mark.fault
@pytest.mark.parametrize("name", ["../x", "a b", "", ".hidden", "x" * 201])
@pytest.mark.parametrize("flag", ["--job", "--rdzv-id", "--host-id"])
def test_a_name_that_is_no_folder_is_refused(flag: str, name: str) -> None:
    with pytest.raises(UsageError, match=r"name .* cannot name a directory"):
        parse(flag, name, "train.py")


def test_a_torchrun_of_an_older_torch_is_read_as_one_of_todays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before torch 2.12 it has another default and a flag less."""

    def older() -> argparse.ArgumentParser:
        parser = get_args_parser()
        for action in list(parser._actions):
            if action.dest == "shutdown_timeout":
                parser._remove_action(action)
            elif action.dest == "master_port":
                action.default = 29500
        return parser

    expected = parse("--nproc-per-node", "2", "t.py")
    monkeypatch.setattr(flags_module, "get_args_parser", older)
    assert parse("--nproc-per-node", "2", "t.py") == expected and expected.coordinator is None
    assert parse("--master-port", "29500", "t.py").coordinator == "127.0.0.1:29500"


@pytest.mark.fault
@pytest.mark.parametrize("names", ["SIGTERM,SIGNOTHING", "SIGTERM,SIGKILL"])
def test_signals_that_no_process_can_handle_are_refused(names: str) -> None:
    with pytest.raises(UsageError, match="no signal that a process can handle"):
        parse("--signals-to-handle", names, "t.py")


def test_a_host_that_drains_may_have_an_exit_code_of_its_own() -> None:
    assert parse("t.py").drained_exit_code == 0
    assert parse("--drained-exit-code", "76", "t.py").drained_exit_code == 76
    with pytest.raises(SystemExit):
        parse("--drained-exit-code", "256", "t.py")


def test_a_wrong_flag_is_said_in_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse("--allowed-sizes", "x", "t.py")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "'x' is neither a number nor LOW-HIGH" in said[1]


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse("--version")
    assert capsys.readouterr().out.startswith("scalai ")
