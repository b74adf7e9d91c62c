"""What ``scalai mount`` shows of data sets: flags over the job's file over what the job says."""

import argparse
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from scalai.core.dataset.table import DatasetTable
from scalai.core.errors import UsageError
from scalai.launch.commands import mount
from scalai.store.host import HostStore
from support.store_states import generation


@pytest.fixture
def told(store: HostStore, tmp_path: Path) -> Iterator[DatasetTable]:
    """What a job says whose generation is in the store."""
    for name in ("own", "other"):
        (tmp_path / name).write_bytes(b"{}\n")
    table = DatasetTable(
        {"own": str(tmp_path / "own")}, shuffle={"own": 5}, global_batch_size=12,
        rampup_batch_size=(4, 4, 60),
    )  # fmt: skip
    generation(store, 1, 3, dataset=table.to_json())
    yield table


def shown(store: HostStore, *flags: str, job: str = "job") -> tuple[DatasetTable, list[str]]:
    """Return what a mount would show, and what it says of that."""
    parser = argparse.ArgumentParser()
    mount.add_parser(parser.add_subparsers())
    root = store.directory.parent.parent
    args = parser.parse_args(["mount", job, "/point", f"--store-dir={root}", *flags])
    with closing(mount._tree(args)) as tree:
        return tree.table, list(mount._said(tree))


def test_without_flags_it_is_what_the_job_says(store: HostStore, told: DatasetTable) -> None:
    table, said = shown(store)
    assert table == told
    assert said == [
        f"data set own: {told.sources['own']} (of the job)",
        "global batch: 12 samples, to which it grows from 4 by 4 over 60 samples (of the job)",
    ]


def test_flags_overrule_it(
    store: HostStore, told: DatasetTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = str(tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    table, said = shown(store, "--source=own=other", "--global-batch-size=8")
    assert table == DatasetTable({"own": other}, shuffle={"own": 5}, global_batch_size=8)
    assert said == [f"data set own: {other}", "global batch: 8 samples"]
    file = tmp_path / "elastic.toml"
    file.write_text(
        f'[dataset]\nsources.more = "{other}"\nrecord_tokens.more = 4\n'
        "global_batch_size = 8\nrampup_batch_size = [2, 2, 30]"
    )
    table, _ = shown(store, "--shuffle=own=6", f"--elastic={file}")
    assert table == DatasetTable(
        {**told.sources, "more": other}, {"more": 4}, {"own": 6}, 8, (2, 2, 30)
    )


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--shuffle=x=1",), r"shuffle names 'x', and sources \['own'\]"),
        (("--shuffle=own=9999999999999999999999",), "expected a whole number"),
        (("--source=own=/nowhere/at/all",), "there is nothing at /nowhere/at/all"),
    ],
)
def test_flags_that_do_not_go_with_it_are_refused(
    store: HostStore, told: DatasetTable, flags: tuple[str, ...], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        shown(store, *flags)


def test_a_source_of_the_job_that_is_not_here_leaves_the_rest(
    store: HostStore, told: DatasetTable, tmp_path: Path
) -> None:
    (tmp_path / "own").unlink()
    other = tmp_path / "other"
    table, said = shown(store, f"--source=other={other}")
    assert table.sources == {**told.sources, "other": str(other)}
    assert said[0].startswith(f"data set own is left out: there is nothing at {tmp_path}/own. ")
    assert said[0].endswith("Say where it lies here: --source own=PATH")
    assert said[1] == f"data set other: {other}"
    with pytest.raises(UsageError, match="there is nothing at"):
        shown(store, f"--source=own={tmp_path}/own")


def test_a_job_without_a_state_has_its_configuration(store: HostStore, tmp_path: Path) -> None:
    file, source = tmp_path / "elastic.toml", tmp_path / "x"
    source.write_bytes(b"{}\n")
    with pytest.raises(UsageError, match="no job 'new' has a store here"):
        shown(store, job="new")
    file.write_text(f'[dataset]\nsources = {{ own = "{source}" }}\n[model]\nglobal_batch_size = 4')
    table, said = shown(store, f"--elastic={file}", job="new")
    assert table == DatasetTable({"own": str(source)}, global_batch_size=4)
    assert said[-1] == "global batch: 4 samples"
    file.write_text(f'[dataset]\nsources = {{ own = "{source}" }}\nshufle = 3')
    with pytest.raises(UsageError, match=r"elastic.toml: \[dataset\] has an unknown key 'shufle'"):
        shown(store, f"--elastic={file}", job="new")


@pytest.mark.parametrize(
    "wrong",
    [{"sources": 3}, {"sources": {"..": "/x"}}, {"shuffle": {"a": 1}}, {"global_batch_size": 0},
     {"global_batch_size": 8, "rampup_batch_size": [1]}],
)  # fmt: skip
def test_what_a_job_cannot_have_said_is_ignored_with_a_reason(
    store: HostStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: dict[str, object]
) -> None:
    generation(store, 1, 3, dataset=wrong)
    (tmp_path / "x").write_bytes(b"{}\n")
    table, said = shown(store, f"--source=x={tmp_path}/x")
    assert table == DatasetTable({"x": f"{tmp_path}/x"})
    assert "event=table_ignored" in caplog.text
    assert said[-1].startswith("no views of replicas: the job does not say its global batch")
