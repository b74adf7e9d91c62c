"""The command line, the elastic configuration and host files: which wins, and every slip named."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from scalai.core.dataset.table import DatasetTable
from scalai.core.degrees.batches import BatchRamp
from scalai.core.degrees.degrees import DegreeRequest, ModelLimits
from scalai.core.degrees.policy import Rule
from scalai.core.errors import UsageError
from scalai.launch import cli
from scalai.launch.config import flags as flags_module
from scalai.launch.config.constants import CONSTANTS, constant
from scalai.launch.config.elastic_config import ElasticConfig, ProbeConfig, load_config
from scalai.launch.config.flags import build_parser, parse_options, with_own_name
from scalai.launch.config.hostfile import (
    expand_for_coordinator,
    expand_hostfile,
    filtered,
    own_name,
    parse_hostfile,
)
from scalai.launch.config.job_spec import JobSpec, own_batch
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
    assert (options.elastic, options.overrides) == (None, {})


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
    assert parse("--snapshot-every", "auto", "t.py").overrides == {"store.snapshot_every": "auto"}


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
@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("", None),
        ("--nnodes 2 --master-addr h", "h:29500"),
        ("--master-addr fe80::1", "[fe80::1]:29500"),
        ("--master-addr [::1] --master-port 1", "[::1]:1"),
        ("--master-addr h --master-port 7", "h:7"),
        ("--standalone --rdzv-endpoint h:7", None),
    ],
)
def test_where_the_coordinator_is(flags: str, found: str | None) -> None:
    assert parse(*flags.split(), "train.py").coordinator == found


def test_a_module_may_stand_for_the_script() -> None:
    options = parse("-m", "package.train", "--lr", "1")
    assert (options.is_module, options.script) == (True, "package.train")


def test_a_check_needs_no_script_but_takes_one() -> None:
    assert parse("--check-elastic", "--elastic", "e.toml").script is None
    options = parse("--check-elastic", "pretrain_gpt.py", "--num-layers", "4")
    assert (options.script, options.script_args) == ("pretrain_gpt.py", ("--num-layers", "4"))
    with pytest.raises(UsageError, match="no training script"):
        parse("--elastic", "e.toml")


def test_a_configuration_is_named_once() -> None:
    with pytest.raises(UsageError, match="given twice"):
        parse("t.py", "--elastic", "a", "--elastic=b")


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

    add = argparse.ArgumentParser.add_argument

    def add_older(parser: argparse.ArgumentParser, *names: str, **how: Any) -> Any:
        return None if "--shutdown-timeout" in names else add(parser, *names, **how)

    def older() -> argparse.ArgumentParser:
        with monkeypatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "add_argument", add_older)
            parser = get_args_parser()
        parser.set_defaults(master_port=29500)
        return parser

    expected = parse("--nproc-per-node", "2", "t.py")
    monkeypatch.setattr(flags_module, "get_args_parser", older)
    assert parse("--nproc-per-node", "2", "t.py") == expected and expected.coordinator is None
    assert parse("--master-port", "29500", "t.py").coordinator == "127.0.0.1:29500"


def test_a_host_that_drains_may_have_an_exit_code_of_its_own() -> None:
    assert parse("t.py").drained_exit_code == 0
    assert parse("--drained-exit-code", "76", "t.py").drained_exit_code == 76


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse("--version")
    assert capsys.readouterr().out.startswith("scalai ")


# ------------------------------------------------------------------ the elastic configuration

Writer = Callable[[str], str]
EXAMPLES = Path(__file__).parents[2] / "configs"


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    def write_file(text: str) -> str:
        path = tmp_path / "elastic.toml"
        path.write_text(text)
        return str(path)

    return write_file


def test_degrees_are_read_in_every_form(write: Writer) -> None:
    config = load_config(
        write(
            """
            [degrees]
            default = "tp2 pp1"
            4 = "tp2 pp1"
            "2->4" = "tp2 pp2"
            8 = ["tp2 pp2", {tp = 4, pp = 1, vpp = 1, micro_batch_size = 1}]
            """
        )
    )
    assert config.default_degrees == DegreeRequest(2, 1)
    assert config.degrees == (
        Rule(4, (DegreeRequest(2, 1),)),
        Rule(4, (DegreeRequest(2, 2),), 2),
        Rule(8, (DegreeRequest(2, 2), DegreeRequest(4, 1, micro_batch_size=1))),
    )
    assert config.policy().initial == DegreeRequest(2, 1)
    assert config.policy(DegreeRequest(4, 1)).initial == DegreeRequest(4, 1)


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(write: Writer) -> None:
    assert load_config(None) == ElasticConfig()
    path = write('[store]\ndir = "/a"\nsnapshot_every = 7\n[resize]\nsettle_s = 1\n')
    config = load_config(path, {"store.dir": "/b"})
    assert (config.store.dir, config.store.snapshot_every) == ("/b", 7)
    assert (config.resize.settle_s, config.resize.drain_timeout_s) == (1.0, 120.0)
    lines = config.describe().splitlines()
    assert "store.dir = /b  (flag)" in lines
    assert "store.snapshot_every = 7  (file)" in lines
    assert "resize.drain_timeout_s = 120.0  (default)" in lines


def test_another_probe_by_flag_puts_the_files_probe_aside(write: Writer) -> None:
    path = write('[probe]\nkind = "command"\ncommand = "count"\ninterval_s = 2\n')
    assert load_config(path, {"probe.kind": "none"}).probe == ProbeConfig("none", interval_s=2.0)
    assert load_config(path, {"probe.kind": "file", "probe.file": "/n"}).probe.file == "/n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[degree]\n", r"unknown key 'degree'; did you mean 'degrees'\?"),
        ("[store]\nsnapshot_evry = 1\n", r"\[store\] has an unknown key 'snapshot_evry'; did you"),
        ("[resize]\nbuild_ahead = 'never'\n",
         r"\[resize\] build_ahead is not known any more. Write standby"),
        ("[resize]\nzzz = 1\n", r"unknown key 'zzz'; known are settle_s, drain_timeout_s"),
        ('[resize]\nsettle_s = "2"\n', r"\[resize\] settle_s = '2' is not a number"),
        ("[store]\nsnapshot_every = true\n",
         "snapshot_every = True is not a whole number or a text"),
        ("[store]\nsnapshot_every = 'often'\n", "'often'; expected 0 to 1000000 steps, or 'auto'"),
        ("[store]\nsnapshot_every = -1\n", "snapshot_every = -1; expected 0 to 1000000 steps"),
        ("[store]\nsnapshot_every = 2000000\n", "2000000; expected 0 to 1000000 steps, or"),
        ("[resize]\nallowed_sizes = [4, 2]\n", "ascending"),
        ("[resize]\nallowed_sizes = 4\n", "allowed_sizes = 4 is not a list"),
        ("[store]\nbudget_gb = -1\n", r"\[store\] budget_gb = -1.0; expected > 0"),
        ('[probe]\nkind = "guess"\n', "one of nvidia-smi, command, file, none"),
        ('[probe]\nkind = "file"\n', "needs it"),
        ('[degrees]\n4 = "tq2"\n', r"\[degrees\] 4 = 'tq2': 'tq2' .* is not a degree"),
        ('[degrees]\nfour = "tp2"\n', "neither a number of ranks"),
        ('[degrees]\n"0->4" = "tp2"\n', "neither a number of ranks"),
        ("[degrees]\n4 = []\n", "the list of candidates is empty"),
        ("[dataset]\nsource = 1\n", "unknown key 'source'; did you mean 'sources'"),
        ("[dataset]\nsources = '/a'\n", r"\[dataset\] sources = '/a' is not a table"),
        ("[dataset.sources]\na = 3\n", r"\[dataset\] sources.a = 3 is not a text"),
        ("[dataset.shuffle]\na = 3\n", r"shuffle names 'a', and sources \[\]"),
        ("[dataset]\nglobal_batch_size = 0\n", r"\[dataset\] global_batch_size = 0; expected 1 to"),
        ("[dataset]\nrampup_batch_size = [1, 1, 9]\n", "needs global_batch_size beside it"),
        *((f"[planner]\n{line}\n", "expected some of micro-batch, recompute") for line in
          ('may_change = ["tp"]', 'memory_may_change = ["virtual-stages"]')),
        ("store = 3\n", "is not a section"),
        ("[store\n", "is not TOML"),
    ],
)  # fmt: skip
def test_every_slip_is_named_with_the_file(write: Writer, text: str, why: str) -> None:
    path = write(text)
    with pytest.raises(UsageError, match=why) as caught:
        load_config(path)
    assert "elastic.toml" in str(caught.value)


@pytest.mark.parametrize("key", CONSTANTS)
def test_a_removed_key_is_ignored_with_one_warning_that_names_the_constant(
    write: Writer, key: str
) -> None:
    section, _, name = key.partition(".")
    config = load_config(write(f"[{section}]\n{name} = 7\n"))
    assert config == ElasticConfig(), "nothing else is changed"
    (warning,) = config.ignored
    said = f"[{section}] {name} = 7 is ignored; it is always {constant(key):g} ("
    assert warning.startswith(said)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UsageError, match=r"--elastic nowhere.toml: No such file.*configs/"):
        load_config("nowhere.toml")


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("elastic_*.toml")), ids=lambda path: path.name
)
def test_the_examples_are_valid(path: Path) -> None:
    load_config(str(path))


def test_stated_limits_win_over_those_that_were_read() -> None:
    stated = ModelLimits(num_layers=4, is_sequence_parallel=True)
    read = ModelLimits(num_layers=8, num_attention_heads=2)
    assert stated.filled_from(read) == ModelLimits(
        num_layers=4, num_attention_heads=2, is_sequence_parallel=True
    )


# ------------------------------------------------------------------ host files

TEXT = "# two hosts\nworker-0 slots=4\n\nworker-1   slots=2  # small\n"
HOSTS = {"worker-0": (0, 1, 2, 3), "worker-1": (0, 1)}


def test_hosts_and_slots_are_read() -> None:
    assert parse_hostfile(TEXT, "hostfile") == HOSTS


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((text, "is not HOST slots=N") for text in ("worker-0", "worker-0 slots=x", "a slots=0")),
        *((text, "names no host") for text in ("", "# one")),
        ("a slots=1\na slots=2", "line 2: a stands there twice"),
    ],
)
def test_a_line_that_is_none_or_stands_twice_is_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse_hostfile(text, "hostfile")


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("worker-1", None, {"worker-1": (0, 1)}),
        ("worker-0:1,3@worker-1", None, {"worker-0": (1, 3), "worker-1": (0, 1)}),
        (None, "worker-1", {"worker-0": (0, 1, 2, 3)}),
        (None, "worker-0:0@worker-1:0,1", {"worker-0": (1, 2, 3)}),
        (None, None, HOSTS),
    ],
)
def test_filters_are_deepspeeds(
    include: str | None, exclude: str | None, left: dict[str, tuple[int, ...]]
) -> None:
    assert filtered(HOSTS, include, exclude) == left


@pytest.mark.parametrize("part", ["worker-2", "worker-1:2", "worker-1:x"])
def test_filters_name_what_is_there(part: str) -> None:
    with pytest.raises(UsageError, match="worker-0 slots=4, worker-1 slots=2"):
        filtered(HOSTS, part, None)
    with pytest.raises(UsageError, match="keep one"):
        filtered(HOSTS, "worker-0", "worker-1")
    with pytest.raises(UsageError, match="no slot is left"):
        filtered(HOSTS, None, "worker-0@worker-1")


def test_this_host_is_found_by_any_of_its_names() -> None:
    assert own_name(HOSTS, None, "worker-1.cluster.local", "hostfile") == "worker-1"
    assert own_name(HOSTS, "worker-0", "elsewhere", "hostfile") == "worker-0"
    with pytest.raises(UsageError, match="Name it by --host-id"):
        own_name(HOSTS, None, "elsewhere", "hostfile")


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text(TEXT)

    def options_of(*argv: str) -> tuple[int, int, str, str | None, str | None]:
        given = ["--hostfile", str(path), "--host-id", "worker-1", *argv, "train.py"]
        expanded, own = expand_hostfile(given, build_parser().parse_args(given))
        assert own == {"worker-1": (0, 1)}
        found = parse_options(expanded)
        return (
            found.min_nodes, found.max_nodes, found.nproc_per_node, found.coordinator, found.host_id
        )  # fmt: skip

    assert options_of() == (1, 2, "2", "worker-0:29500", "worker-1")
    assert options_of("--nnodes", "2", "--coordinator", "head:1") == (
        2, 2, "2", "head:1", "worker-1"
    )  # fmt: skip


@pytest.mark.parametrize("filters", [(), ("--exclude", "worker-1")])
def test_a_coordinator_elsewhere_reads_the_same_job_as_the_agents(
    tmp_path: Path, filters: tuple[str, ...]
) -> None:
    path = tmp_path / "hostfile"
    path.write_text(f"{TEXT}worker-2 slots=8\n")
    flags = ["--hostfile", str(path), *filters]
    given = [*flags, "train.py"]
    expanded = expand_for_coordinator(given, build_parser().parse_args(given))
    job = JobSpec.read(parse_options(expanded))
    assert job.options.coordinator == "worker-0:29500"
    assert job.max_hosts == (2 if filters else 3)
    of_agent = [*flags, "--host-id", "worker-2", "train.py"]
    expanded, _ = expand_hostfile(of_agent, build_parser().parse_args(of_agent))
    assert job.difference(JobSpec.read(parse_options(expanded))) is None


def test_a_coordinator_asks_where_to_listen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hostfile"
    path.write_text("worker-0 slots=4\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["coordinator", "--", "--hostfile", str(path), "train.py"])
    assert ended.value.code == 2
    assert "say where to listen: --listen HOST:PORT" in capsys.readouterr().err


def test_filters_without_a_file_are_refused() -> None:
    argv = ["--include", "worker-0", "train.py"]
    with pytest.raises(UsageError, match="name it too"):
        expand_hostfile(argv, build_parser().parse_args(argv))


# ------------------------------------------------------------------ the own batch

MEGATRON = ("--micro-batch-size", "2", "--num-attention-heads", "4", "--global-batch-size", "64")


@pytest.mark.parametrize(
    ("args", "stated", "deepspeed", "facts", "batch"),
    [
        (MEGATRON, 12, None, {}, 64),
        ((*MEGATRON, "--rampup-batch-size", "16", "16", "900"), None, None, {},
         BatchRamp(16, 16, 900, 64)),
        ((*MEGATRON, "--step-batch-size-schedule", "0:32 1K:64"), None, None, {}, None),
        ((*MEGATRON, "--rampup-batch-size", "1", "5", "900"), None, None, {}, None),
        (MEGATRON[:4], None, None, {}, None),
        ((*MEGATRON[:5], "many"), None, None, {}, None),
        ((*MEGATRON[:5], str(1 << 40)), None, None, {}, None),
        (("--steps", "3"), 12, {"train_batch_size": 8}, {"global_batch_size": 16}, 12),
        ((), None, {"train_batch_size": 8}, {"global_batch_size": 16}, 8),
        ((), None, {}, {"global_batch_size": 16}, 16),
        ((), None, None, {"global_batch_size": "16"}, None),
        ((), None, None, {}, None),
    ],
)  # fmt: skip
def test_it_is_what_the_job_trains_with_or_not_known(
    args: tuple[str, ...], stated: int | None, deepspeed: Any, facts: Any,
    batch: int | BatchRamp | None,
) -> None:  # fmt: skip
    assert own_batch(args, stated, deepspeed, facts) == DatasetTable.of_batch(batch)
