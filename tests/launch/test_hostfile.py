"""DeepSpeed's host files say how many hosts there are, and how many workers this one has."""

from pathlib import Path

import pytest

from scalai.core.errors import UsageError
from scalai.launch.cli import main
from scalai.launch.config.flags import build_parser, parse_options
from scalai.launch.config.hostfile import (
    expand_for_coordinator,
    expand_hostfile,
    filtered,
    own_name,
    parse_hostfile,
)
from scalai.launch.config.job_spec import JobSpec

TEXT = "# two hosts\nworker-0 slots=4\n\nworker-1   slots=2  # small\n"
HOSTS = {"worker-0": (0, 1, 2, 3), "worker-1": (0, 1)}


def test_hosts_and_slots_are_read() -> None:
    assert parse_hostfile(TEXT, "hostfile") == HOSTS


@pytest.mark.parametrize("text", ["worker-0", "worker-0 slots=x", "worker-0 slots=0", "", "# one"])
def test_a_line_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not HOST slots=N|names no host"):
        parse_hostfile(text, "hostfile")


def test_a_host_that_stands_there_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="line 2: a stands there twice"):
        parse_hostfile("a slots=1\na slots=2", "hostfile")


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
        main(["coordinator", "--", "--hostfile", str(path), "train.py"])
    assert ended.value.code == 2
    assert "say where to listen: --listen HOST:PORT" in capsys.readouterr().err


def test_filters_without_a_file_are_refused() -> None:
    argv = ["--include", "worker-0", "train.py"]
    with pytest.raises(UsageError, match="name it too"):
        expand_hostfile(argv, build_parser().parse_args(argv))
