"""What was written before is still read: ``tests/data`` holds it, ``tests/support/write_saved.py``
wrote it."""

import json
from pathlib import Path

import numpy as np
import pytest

from scalai.converters.checkpoint import Checkpoint
from scalai.converters.describe import read_tensor
from scalai.converters.generation_layout import PARTS, StoredGeneration
from scalai.converters.layouts import open_checkpoint
from scalai.core.errors import RefusedError
from scalai.launch import cli
from scalai.launch.agent.durable import attach_durable, refuse_finished
from scalai.launch.commands.status import change_text
from scalai.launch.config.constants import CONSTANTS
from scalai.launch.config.elastic_config import load_config
from scalai.launch.config.flags import parse_options
from scalai.launch.config.hostfile import filtered, parse_hostfile
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.held_states import HeldStates
from scalai.store.files import decode
from scalai.store.host import HostStore
from support.command import logged
from support.mixed_state import NUMBER, STEP, TENSORS, bits_of
from support.tiny_job import ROWS, initial
from support.tiny_job import advance as one_step

DATA = Path(__file__).parent / "data"
SAVED = sorted(path.parents[1] for path in DATA.glob("*/durable/mixed"))
RELEASES = sorted(path.parent for path in DATA.glob("*/elastic.toml"))


@pytest.fixture(params=SAVED, ids=lambda folder: folder.name)
def saved(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.param
    return folder


@pytest.fixture(params=RELEASES, ids=lambda folder: folder.name)
def release(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.param
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command of ``scalai``, which must end with 0, and return what it printed."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    assert ended.value.code == 0, printed.err
    return printed.out


def test_the_folder_stays_small() -> None:
    assert SAVED
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 100_000


def stored_in(checkpoint: Checkpoint) -> StoredGeneration:
    """Return the manifests behind a generation that was opened as a checkpoint."""
    found = checkpoint.values.extra[PARTS]
    assert isinstance(found, StoredGeneration)
    return found


def test_every_tensor_of_a_saved_generation_has_its_values(saved: Path) -> None:
    checkpoint = open_checkpoint(saved / "durable" / "mixed")
    stored = stored_in(checkpoint)
    generation, numbers = stored.generation, list(stored.numbers)
    assert (numbers, generation.step) == ([NUMBER], STEP)
    for expected in TENSORS:
        tensor, values = read_tensor(checkpoint, expected.name)
        assert tensor == expected
        assert np.array_equal(values, decode(bits_of(expected), expected.dtype))
    assert generation.scalars["best"] == float("inf") and generation.scalars["user"] == {"ü": 0}
    assert sorted(generation.rank_state) == ["tp0-dp0", "tp0-dp1", "tp1-dp0", "tp1-dp1"]


def test_a_saved_generation_is_inspected_verified_and_resharded(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = saved / "durable" / "mixed"
    report = json.loads(run(capsys, "inspect", "--verify", "--json", place))
    assert report["is_whole"] and report["is_verified"] and len(report["tensors"]) == len(TENSORS)
    assert len(json.loads(run(capsys, "verify", "--json", place))["fingerprints"]) == len(TENSORS)
    run(capsys, "reshard", place, tmp_path / "one", "--tp", 1, "--dp", 1)
    assert run(capsys, "verify", place, tmp_path / "one") == f"equal: {len(TENSORS)} tensors\n"


def test_two_models_are_told_so_before_their_tensors(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    durable = saved / "durable"
    code, said = logged(capsys, "verify", durable / "mixed", durable / "tiny")
    assert code == 4 and "are different models: " in said.splitlines()[0], said


def test_a_host_attaches_a_saved_generation_and_the_coordinator_finds_it_whole(
    saved: Path, tmp_path: Path
) -> None:
    with HostStore("mixed", "c", tmp_path / "store") as store:
        assert attach_durable(store, saved / "durable" / "mixed") == {}
        part = store.manifest(NUMBER)
        with store.open_rows(NUMBER) as rows:
            assert not list(rows.damage())
    generations = HeldStates()
    assert generations.offer(part)
    assert [whole.number for whole in generations.covered()] == [NUMBER]


def test_what_a_job_left_is_the_state_of_its_step(release: Path) -> None:
    checkpoint = open_checkpoint(release / "durable" / "tiny")
    generation = stored_in(checkpoint).generation
    matrix, vector = initial()
    for step in range(1, generation.step + 1):
        one_step(matrix, vector, step)
    _, found = read_tensor(checkpoint, "param/matrix")
    assert found.tolist() == matrix.tolist() and len(found) == ROWS
    assert int(read_tensor(checkpoint, "step/matrix")[1]) == generation.step
    assert generation.scalars["user"] == {"samples": generation.step}


def test_a_job_that_has_finished_is_still_known(release: Path) -> None:
    with pytest.raises(RefusedError, match=r"job 'done' finished at step 120 on \d{4}-"):
        refuse_finished(release / "durable" / "done")


def test_status_tells_of_a_change_that_was_reported(release: Path) -> None:
    last = json.loads((release / "reports" / "resize-0002.json").read_text())
    assert "TP2·PP1·DP1 -> TP1·PP1·DP1: " in change_text(last)


def test_every_key_of_an_elastic_configuration_still_means_the_same(release: Path) -> None:
    config = load_config(str(release / "elastic.toml"))
    logged = set((release / "elastic.txt").read_text().splitlines())
    removed = {line for line in logged if line.split(" = ")[0] in CONSTANTS}
    # A release may know more keys, with defaults; a removed one is told by one warning.
    assert logged - removed <= set(config.describe().splitlines())
    stated = [line for line in removed if line.endswith("(file)")]
    assert len(config.ignored) == len(stated)
    for line in stated:
        section, _, name = line.split(" = ")[0].partition(".")
        assert any(each.startswith(f"[{section}] {name} = ") for each in config.ignored), line
    flags = ["--job", "job", "train.py", "--deepspeed_config", str(release / "deepspeed.json")]
    spec = JobSpec.read(parse_options(flags))
    assert spec.config == config and spec.deepspeed is not None


def test_a_host_file_is_still_read(release: Path) -> None:
    hosts = parse_hostfile((release / "hostfile").read_text(), "hostfile")
    assert hosts == {"worker-1": (0, 1, 2, 3), "worker-2": (0, 1)}
    kept = filtered(hosts, "worker-1:1,3@worker-2", None)
    assert kept == {"worker-1": (1, 3), "worker-2": (0, 1)}
