"""Megatron's indexed data sets by ``scalai://…``, without a mount."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

pytest.importorskip("megatron.core")

import megatron.core.datasets.indexed_dataset as module

from scalai.core.errors import RefusedError
from scalai.patches.megatron import indexed_source
from scalai.vfs.filesystem import ScalaiFileSystem
from support.data_files import write_tokens


@pytest.fixture
def indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Megatron's module with the hook; the data set is told as a job is told it."""
    write_tokens(tmp_path / "data" / "corpus", [5, 3, 8])
    sources = {"sources": {"corpus": str(tmp_path / "data")}}
    monkeypatch.setitem(fsspec.config.conf, "scalai", sources)
    fresh = {"initialize": module.IndexedDataset.initialize, "exists": module.IndexedDataset.exists}
    indexed_source.hook(module)
    yield module
    ScalaiFileSystem.clear_instance_cache()
    module.IndexedDataset.initialize = fresh["initialize"]
    module.IndexedDataset.exists = staticmethod(fresh["exists"])


PREFIX = "scalai://job/dataset/corpus/source/corpus"


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
    indexed: Any, tmp_path: Path
) -> None:
    data = indexed.IndexedDataset(PREFIX)
    path = tmp_path / "data" / "corpus.bin"
    whole = path.read_bytes()
    with pytest.raises(RefusedError, match="has 32 bytes, and its index wants 9 tokens"):
        data.bin_reader.read(np.uint16, 9, 16)
    path.write_bytes(bytes(len(whole)))
    data.bin_reader._checked = 0.0
    with pytest.raises(OSError, match="is not what was opened: its size or time changed"):
        data[0]


def test_data_beside_which_nothing_can_be_written_need_a_cache() -> None:
    for flags in ({"data_path": ["1", PREFIX, "2", "/data/x"]}, {"train_data_path": [PREFIX]}):
        with pytest.raises(RefusedError, match=f"beside {PREFIX}, .* Add --data-cache-path FOLDER"):
            indexed_source.check_cache(flags)
        indexed_source.check_cache({**flags, "data_cache_path": "/cache"})
    for allowed in ({"data_path": ["/data/x"]}, {"mock_data": True}, {"data_args_path": "/none"}):
        indexed_source.check_cache(allowed)
