"""Megatron's indexed data sets by ``scalai://…`` and through a mount: the same samples, and errors
with a reason where a memory map would have its reader killed."""

import errno
import importlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from scalai.core.dataset.ledger import difference
from scalai.core.errors import RefusedError
from scalai.patches.megatron import indexed_source
from scalai.patches.megatron.data_facts import facts_of
from scalai.vfs import mounts
from scalai.vfs.filesystem import ScalaiFileSystem
from support.data_files import write_tokens
from support.needed import need
from support.stopping import stop
from support.waiting import wait_until

need("megatron.core", "pip install scalai[megatron]")

needs_fuse = pytest.mark.skipif(
    not Path("/dev/fuse").exists() or shutil.which("fusermount3") is None,
    reason="no /dev/fuse here, or no fuse3",
)
LENGTHS = [n % 37 + 3 for n in range(400)]
SCALAI = Path(sys.executable).with_name("scalai")


class Corpus:
    """A data set, and the three ways to it."""

    def __init__(self, folder: Path) -> None:
        self.data, self.point = folder / "data", folder / "point"
        self.point.mkdir()
        tokens = write_tokens(self.data / "corpus", LENGTHS)
        self.sequences = np.split(tokens, np.cumsum(LENGTHS)[:-1])
        self.raw = str(self.data / "corpus")
        self.hooked = PREFIX
        self.mounted = str(self.point / "dataset" / "corpus" / "source" / "corpus")
        self.process, self.opened = -1, open(os.devnull, "rb")

    def mount(self) -> None:
        command = [str(SCALAI), "mount", "job", str(self.point), f"--source=corpus={self.data}"]
        command += [f"--log={self.data.with_name('log')}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100, check=True)
        found = re.search(r"by process (\d+)", done.stdout)
        assert found is not None
        self.process = int(found[1])
        self.opened.close()
        self.opened = open(self.mounted + ".bin", "rb")

    def forget(self) -> None:
        """Have the kernel ask the mount for the bytes again."""
        os.posix_fadvise(self.opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def megatrons(name: str) -> Any:
    """Return a module of Megatron's data sets."""
    return importlib.import_module(f"megatron.core.datasets.{name}")


@contextmanager
def hooked(data: Path) -> Iterator[Any]:
    """Megatron's module with the hook; the data set is told as a job is told it."""
    module = megatrons("indexed_dataset")
    fresh = module.IndexedDataset.initialize, module.IndexedDataset.exists
    indexed_source.hook(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fsspec.config.conf, "scalai", {"sources": {"corpus": str(data)}})
        yield module
    ScalaiFileSystem.clear_instance_cache()
    module.IndexedDataset.initialize = fresh[0]
    module.IndexedDataset.exists = staticmethod(fresh[1])


PREFIX = "scalai://job/dataset/corpus/source/corpus"


@pytest.fixture
def indexed(tmp_path: Path) -> Iterator[Any]:
    write_tokens(tmp_path / "data" / "corpus", [5, 3, 8])
    with hooked(tmp_path / "data") as hooked_module:
        yield hooked_module


@pytest.fixture(scope="module")
def unserved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corpus]:
    made = Corpus(tmp_path_factory.mktemp("mounted"))
    with hooked(made.data):
        yield made
    made.opened.close()
    if mounts.find_mount(made.point) is not None:
        mounts.unmount(made.point, is_lazy=True)


@pytest.fixture
def corpus(unserved: Corpus) -> Corpus:
    """The corpus, mounted."""
    mount = mounts.find_mount(unserved.point)
    if mount is None or mounts.health_of(mount) is not mounts.MountHealth.ANSWERS:
        unserved.mount()
    return unserved


def test_megatron_reads_a_data_set_without_a_mount(indexed: Any, tmp_path: Path) -> None:
    local = indexed.IndexedDataset(str(tmp_path / "data" / "corpus"))
    assert indexed.IndexedDataset.exists(PREFIX)
    assert not indexed.IndexedDataset.exists(PREFIX + "x")
    data = indexed.IndexedDataset(PREFIX)
    for each in (data, pickle.loads(pickle.dumps(data))):
        assert len(each) == len(local) == 3 and each.path_prefix == PREFIX
        assert all(np.array_equal(each[n], local[n]) for n in range(3))
        assert np.array_equal(each.get(2, offset=2, length=3), local[2][2:5])


@pytest.mark.fault
def test_megatron_reads_nothing_of_a_data_set_that_was_cut_or_changed(
    indexed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = indexed.IndexedDataset(PREFIX)
    path = tmp_path / "data" / "corpus.bin"
    whole = path.read_bytes()
    with pytest.raises(RefusedError, match="has 32 bytes, and its index wants 9 tokens"):
        data.bin_reader.read(np.uint16, 9, 16)
    path.write_bytes(bytes(len(whole)))
    monkeypatch.setattr(indexed_source, "CHECK_S", -1.0)
    with pytest.raises(OSError, match="is not what was opened: its size or time changed"):
        data[0]


def test_data_beside_which_nothing_can_be_written_need_a_cache() -> None:
    for flags in ({"data_path": ["1", PREFIX, "2", "/data/x"]}, {"train_data_path": [PREFIX]}):
        with pytest.raises(RefusedError, match=f"beside {PREFIX}, .* Add --data-cache-path FOLDER"):
            indexed_source.check_cache(flags)
        indexed_source.check_cache({**flags, "data_cache_path": "/cache"})
    for allowed in ({"data_path": ["/data/x"]}, {"mock_data": True}, {"data_args_path": "/none"}):
        indexed_source.check_cache(allowed)


def built(prefix: str, cache: Path) -> Any:
    gpt = megatrons("gpt_dataset")
    builder = megatrons("blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder
    tokenizer = SimpleNamespace(eod=0, pad=0, vocab_size=60000, unique_identifiers={})
    config = gpt.GPTDatasetConfig(
        random_seed=1, sequence_length=32, blend=([prefix], None), split="9,1,0",
        path_to_cache=str(cache), tokenizer=tokenizer, reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
    )  # fmt: skip
    return builder(gpt.GPTDataset, [500, 8, 0], lambda: True, config).build()[0]


@needs_fuse
def test_megatron_draws_the_same_samples_in_all_three_ways_and_the_ledger_lets_it_change(
    corpus: Corpus, tmp_path: Path
) -> None:
    """Over more than an epoch, also by a worker of a loader; told as one data set."""
    ways = (corpus.raw, corpus.hooked, corpus.mounted)
    found, facts = [], []
    for number, prefix in enumerate(ways):
        data = built(prefix, tmp_path / f"cache-{number}")
        loader = torch.utils.data.DataLoader(
            data, batch_size=8, num_workers=1, collate_fn=lambda each: [s["tokens"] for s in each]
        )
        alone = torch.stack([data[n]["tokens"] for n in range(64)])
        found.append(torch.cat([torch.stack(batch) for batch in loader]))
        assert torch.equal(alone, found[-1][:64])
        facts.append(facts_of({"seed": 1, "data_path": [prefix]}, data, len(data)))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert not difference(facts[0], facts[1]) and not difference(facts[1], facts[2])
    other = tmp_path / "corpus"
    other.with_suffix(".idx").write_bytes(Path(corpus.raw + ".idx").read_bytes())
    other.with_suffix(".bin").write_bytes(bytes(Path(corpus.raw + ".bin").stat().st_size))
    data = built(str(other), tmp_path / "cache-other")
    changed = facts_of({"seed": 1, "data_path": [str(other)]}, data, len(data))
    assert difference(facts[0], changed).startswith("content of corpus=")
    assert "samples" not in difference(facts[0], changed)


@needs_fuse
@pytest.mark.fault
def test_a_read_that_waits_for_a_stopped_mount_is_told_of_and_goes_on_with_it(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(indexed_source, "LOOK_S", 0.1)
    monkeypatch.setattr(indexed_source, "SAY_S", 0.2)
    monkeypatch.setattr(indexed_source, "START_S", 0.5)
    monkeypatch.setattr(indexed_source, "_WATCH", indexed_source._Watch())
    module = megatrons("indexed_dataset")
    data = module.IndexedDataset(corpus.mounted)
    corpus.forget()
    stop(corpus.process)
    prefix, wanted = corpus.mounted, corpus.sequences[7]
    assert errno_of(lambda: module.IndexedDataset(prefix), "is stopped") == errno.ETIMEDOUT

    def let_go() -> None:
        try:
            wait_until(lambda: f"path={prefix}.bin" in caplog.text, "the read is told of")
        finally:
            os.kill(corpus.process, signal.SIGCONT)

    threading.Thread(target=let_go, daemon=True).start()
    assert np.array_equal(data[7], wanted)
    assert "event=read_waits" in caplog.text and "kill -CONT" in caplog.text


@needs_fuse
@pytest.mark.fault
def test_a_mount_that_ends_gives_an_error_with_the_reason_and_the_way_out(corpus: Corpus) -> None:
    module = megatrons("indexed_dataset")
    data = module.IndexedDataset(corpus.mounted)
    assert np.array_equal(data[7], corpus.sequences[7])
    with pytest.raises(RefusedError, match="its index wants 90000 tokens from byte 16 on"):
        data.bin_reader.read(np.uint16, 90000, 16)
    corpus.forget()
    os.kill(corpus.process, signal.SIGKILL)
    assert errno_of(lambda: data[7], "corpus.bin cannot be read: the process of the mount at") in (
        errno.ENOTCONN, errno.ECONNABORTED,
    )  # fmt: skip
    exists = module.IndexedDataset.exists
    assert errno_of(lambda: exists(corpus.mounted), "Mount again") == errno.ENOTCONN
    assert errno_of(lambda: module.IndexedDataset(corpus.mounted), "has ended") == errno.ENOTCONN
    corpus.mount()
    assert np.array_equal(module.IndexedDataset(corpus.mounted)[7], corpus.sequences[7])


@needs_fuse
def test_a_source_that_is_cut_gives_an_error_through_the_mount_and_no_other_bytes(
    corpus: Corpus,
) -> None:
    module = megatrons("indexed_dataset")
    data = module.IndexedDataset(corpus.mounted)
    whole = Path(corpus.raw + ".bin").read_bytes()
    os.truncate(corpus.raw + ".bin", 100)
    corpus.forget()
    assert errno_of(lambda: data[300], "corpus.bin cannot be read: its source changed") == errno.EIO
    assert "event=read_failed" in corpus.data.with_name("log").read_text()
    Path(corpus.raw + ".bin").write_bytes(whole)
    assert errno_of(lambda: data[300], "mount again") == errno.EIO, "until it is mounted anew"
    os.kill(corpus.process, signal.SIGKILL)


def errno_of(call: Callable[[], object], match: str) -> int | None:
    with pytest.raises(OSError, match=match) as raised:
        call()
    return raised.value.errno
