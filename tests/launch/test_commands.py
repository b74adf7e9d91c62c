"""Commands around a job: what they refuse, what a generation holds, what a mount shows."""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from scalai.core.dataset.table import DatasetTable
from scalai.core.errors import (
    LayoutError,
    ProofError,
    RefusedError,
    ScalaiError,
    StoreError,
    UsageError,
)
from scalai.core.messages.shared import JsonText
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.fingerprint import piece_fingerprint
from scalai.core.tensors.region import whole
from scalai.launch import cli
from scalai.launch.commands import inspect, mount
from scalai.launch.config.endpoint import read_ending, write_card, write_ending
from scalai.launch.coordinator.person_calls import Resume, Scale
from scalai.runtime.calls import Server
from scalai.store.files import decode
from scalai.store.host import HostStore
from support.store_states import HALF, WEIGHT, Opener, generation, two_ranks, values_of

TOKEN = b"a secret of this job"


STATUS, SCALE = ["status"], ["scale", "--nproc", "1"]


@pytest.mark.fault
@pytest.mark.parametrize(
    ("command", "job", "code", "why"),
    [
        *((command, "../x", 2, "job name '../x' cannot name a directory")
          for command in (STATUS, SCALE)),
        *((command, "j", 3, "may be written to by other users")
          for command in (STATUS, SCALE, ["clean"])),
    ],
)  # fmt: skip
def test_a_name_that_is_no_folder_or_a_store_that_others_may_write_to_is_refused(
    command: list[str], job: str, code: int, why: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = tmp_path / "store" / "j"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--store-dir", str(folder.parent), "--job", job])
    assert ended.value.code == code and why in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--dry-run"]], ids=["done", "dry"])
def test_a_wish_that_is_only_tried_says_that_nothing_is_changed(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "j"
    folder.mkdir(mode=0o700)
    answer = JsonText.of({"reason": "2 ranks: TP1·PP1·DP2"})
    server = Server(("127.0.0.1", 0), TOKEN, Scale | Resume, lambda *call: answer)
    assert not isinstance(server.address, str)
    write_card(folder, server.address, TOKEN)
    for wish in (["scale", "--nproc", "2"], ["resume", "--generation", "3"]):
        with pytest.raises(SystemExit) as ended:
            cli.main([*wish, *flags, "--store-dir", str(tmp_path), "--job", "j"])
        said = capsys.readouterr().out
        assert not ended.value.code and answer.value()["reason"] in said
        assert ("nothing is changed" in said) is bool(flags)
        with pytest.raises(SystemExit):
            cli.main([*wish, *flags, "--json", "--store-dir", str(tmp_path), "--job", "j"])
        found = json.loads(capsys.readouterr().out)
        assert found == {"dry_run": bool(flags), **answer.value()}
    server.close()


def test_the_status_of_a_job_that_has_ended_says_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "j"
    folder.mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    write_ending(folder, 75, "saved to the durable directory")
    with pytest.raises(SystemExit, match="1"):
        cli.main(["status", "--store-dir", str(tmp_path), "--job", "j"])
    said = capsys.readouterr().err
    assert "no job 'j' runs here" in said
    assert "exit code 75: saved to the durable directory" in said
    write_card(folder, ("127.0.0.1", 1), TOKEN)
    assert read_ending(folder) is None, "another one runs"


# ------------------------------------------------------------------ scalai inspect


def inspected(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run the command and return what it printed."""
    parser = argparse.ArgumentParser()
    inspect.add_parser(parser.add_subparsers())
    args = parser.parse_args(["inspect", *map(str, arguments)])
    assert args.run(args) == 0
    return capsys.readouterr().out


def halves(open_store: Opener, hosts: Sequence[str] = ("a", "b")) -> list[HostStore]:
    """Let each of two hosts hold a half of the weight, and the rest: generations 1 and 2."""
    stores = [open_store(host=host) for host in hosts]
    for rank, store in enumerate(stores):
        for step in (1, 2):
            generation(store, step, step, {rank: two_ranks()[rank]})
    return stores


def test_every_place_shows_the_generation(
    open_store: Opener, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stores = halves(open_store)
    for store in stores:
        store.copy_to(2, tmp_path / "disk")
    part, job = stores[0].generation_directory(2), stores[0].directory.parent
    hosts = {
        part: ["a"],
        stores[0].directory: ["a"],
        job: ["a", "b"],
        tmp_path / "disk": ["a", "b"],
        tmp_path / "disk" / "generation-2": ["a", "b"],
        tmp_path / "disk" / "generation-2" / "b": ["b"],
    }
    for path, expected in hosts.items():
        report = json.loads(inspected(capsys, path, "--json"))
        assert (report["generation"], report["step"]) == (2, 2), path
        assert [host["host"] for host in report["hosts"]] == expected, path
        assert report["is_whole"] == (len(expected) == 2), path


def test_fingerprints_are_those_of_whole_tensors(
    open_store: Opener, capsys: pytest.CaptureFixture[str]
) -> None:
    job = halves(open_store)[0].directory.parent
    report = json.loads(inspected(capsys, job, "--json", "--generation", 1))
    found = {tensor["name"]: tensor for tensor in report["tensors"]}
    for tensor in (WEIGHT, HALF):
        expected = piece_fingerprint(values_of(tensor, 1), whole(tensor.shape), tensor.shape)
        assert found[tensor.name]["fingerprint"] == f"{expected:016x}"
    assert len(found[WEIGHT.name]["pieces"]) == len(found[HALF.name]["pieces"]) == 2
    assert report["generations"] == [1, 2]


def test_the_text_names_layout_step_sizes_and_fingerprints(
    open_store: Opener, capsys: pytest.CaptureFixture[str]
) -> None:
    stores = halves(open_store)
    text = inspected(capsys, stores[0].directory.parent, "--verify")
    assert "generation 2  step 2  (also here: 1)" in text
    assert "degrees    tp=2" in text and "consumed_samples 24" in text
    assert "whole" in text and "not whole" not in text and "computed again and equal" in text
    assert "[0:6,4:8]  b/rank-1" in text and "[0:5,0:3]  a/rank-0 b/rank-1" in text
    half = inspected(capsys, stores[0].directory)
    assert "not whole: 1 boxes are on none of these hosts, first param/w[0:6,4:8]" in half


def test_values_of_one_tensor(
    open_store: Opener, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stores = halves(open_store)
    job = stores[0].directory.parent
    found = json.loads(inspected(capsys, job, "--tensor", "param/w", "--json"))
    bits = np.array(found["values"], dtype=np.float32).view(np.uint32)
    is_number = ~np.isnan(values_of(WEIGHT, 2).view(np.float32))
    assert np.array_equal(bits[is_number], values_of(WEIGHT, 2)[is_number])
    assert "param/w  F32[6, 8]  step 2" in inspected(capsys, job, "--tensor", "param/w")
    with pytest.raises(LayoutError, match="Name the directory of all hosts"):
        inspected(capsys, stores[0].directory, "--tensor", "param/w")
    with pytest.raises(UsageError, match=r"no tensor 'w'.*param/w"):
        inspected(capsys, job, "--tensor", "w")


def test_damage_is_found(store: HostStore, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = generation(store, 1, step=1)
    path = store.generation_directory(1) / manifest.files[0].name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    inspected(capsys, store.directory)
    with pytest.raises(ProofError, match=f"in {path} has fingerprint"):
        inspected(capsys, store.directory, "--verify")
    path.write_bytes(content[:-1])
    with pytest.raises(StoreError, match=str(path)):
        inspected(capsys, store.directory)


def test_what_is_not_there_is_said(
    open_store: Opener, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store()
    generation(store, 1, step=1)
    with pytest.raises(ScalaiError, match=r"\[1\]"):
        inspected(capsys, store.directory, "--generation", "9")
    jobs = store.directory.parent.parent
    assert "generation 1" in inspected(capsys, jobs), "of one job"
    generation(open_store("other"), 1, step=2)
    with pytest.raises(RefusedError, match=r"2 checkpoints: job \(scalai\), other \(scalai\)"):
        inspected(capsys, jobs)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RefusedError, match="holds no committed generation"):
        inspected(capsys, tmp_path / "empty")


def test_overlapping_pieces_have_no_common_fingerprint(
    open_store: Opener, capsys: pytest.CaptureFixture[str]
) -> None:
    left, both = open_store(host="a"), open_store(host="b")
    generation(left, 1, 1, {0: two_ranks()[0]})
    generation(both, 1, 1, {1: Collection.of([(WEIGHT, whole(WEIGHT.shape))])})
    report = json.loads(inspected(capsys, left.directory.parent, "--json"))
    found = {tensor["name"]: tensor["fingerprint"] for tensor in report["tensors"]}
    assert report["is_whole"] and found["param/w"] is None and found["param/h"] is not None


def test_small_floats_are_decoded() -> None:
    torch = pytest.importorskip("torch")
    patterns = np.arange(256, dtype=np.uint8)
    for name, dtype in (("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)):
        expected = torch.from_numpy(patterns).view(dtype).float().numpy()
        assert np.array_equal(decode(patterns, name), expected, equal_nan=True)
    half = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(half.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(decode(half, "BF16"), expected, equal_nan=True)
    assert decode(values_of(Tensor("t", (3,), "I64")), "I64").dtype == np.int64


# ------------------------------------------------------------------ scalai mount


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
    with closing(mount.shown_tree(args)) as tree:
        return tree.table, list(mount.said_of(tree))


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
