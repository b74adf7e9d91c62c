"""The elastic configuration: flag over file over default, and every slip named."""

from collections.abc import Callable
from pathlib import Path

import pytest

from scalai.core.degrees.choice import choose
from scalai.core.degrees.degrees import DegreeRequest, ModelLimits
from scalai.core.degrees.policy import Rule
from scalai.core.errors import UsageError
from scalai.launch.config.constants import CONSTANTS, constant
from scalai.launch.config.elastic_config import (
    ElasticConfig,
    ProbeConfig,
    load_config,
    parse_config,
)

Writer = Callable[[str], str]
EXAMPLES = Path(__file__).parents[2] / "configs"


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    def write_file(text: str) -> str:
        path = tmp_path / "elastic.toml"
        path.write_text(text)
        return str(path)

    return write_file


def test_nothing_given_is_the_defaults() -> None:
    assert load_config(None) == ElasticConfig()


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
        (
            "[resize]\nbuild_ahead = 'never'\n",
            r"\[resize\] build_ahead is not known any more. Write standby",
        ),
        ("[resize]\nzzz = 1\n", r"unknown key 'zzz'; known are settle_s, drain_timeout_s"),
        ('[resize]\nsettle_s = "2"\n', r"\[resize\] settle_s = '2' is not a number"),
        (
            "[store]\nsnapshot_every = true\n",
            "snapshot_every = True is not a whole number or a text",
        ),
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
        (
            "[dataset]\nsource = 1\n",
            "unknown key 'source'; did you mean 'sources'",
        ),
        ("[dataset]\nsources = '/a'\n", r"\[dataset\] sources = '/a' is not a table"),
        ("[dataset.sources]\na = 3\n", r"\[dataset\] sources.a = 3 is not a text"),
        ("[dataset.shuffle]\na = 3\n", r"shuffle names 'a', and sources \[\]"),
        ("[dataset]\nglobal_batch_size = 0\n", r"\[dataset\] global_batch_size = 0; expected 1 to"),
        ("[dataset]\nrampup_batch_size = [1, 1, 9]\n", "needs global_batch_size beside it"),
        ("store = 3\n", "is not a section"),
        ("[store\n", "is not TOML"),
    ],
)
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


def test_the_demonstrations_table_takes_the_way_it_should() -> None:
    config = load_config(str(EXAMPLES / "elastic_gpt_tiny.toml"))
    present, seen = None, []
    for world in (4, 2, 4, 3, 1):
        present = choose(world, config.model, config.policy(), present).degrees
        seen.append(str(present))
    assert seen == ["TP2·PP1·DP2", "TP1·PP2·DP1", "TP2·PP2·DP1", "TP1·PP1·DP3", "TP1·PP1·DP1"]


def test_stated_limits_win_over_those_that_were_read() -> None:
    stated = ModelLimits(num_layers=4, is_sequence_parallel=True)
    read = ModelLimits(num_layers=8, num_attention_heads=2)
    assert stated.filled_from(read) == ModelLimits(
        num_layers=4, num_attention_heads=2, is_sequence_parallel=True
    )


@pytest.mark.parametrize("line", ['may_change = ["tp"]', 'memory_may_change = ["virtual-stages"]'])
def test_only_what_may_be_freed_is_taken(line: str) -> None:
    with pytest.raises(UsageError, match="expected some of micro-batch, recompute"):
        parse_config(f"[planner]\n{line}\n", "mine.toml")
