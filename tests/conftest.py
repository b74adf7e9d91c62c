"""Support for all tests: the modules in ``support``, and stores in a temporary directory."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

if TYPE_CHECKING:
    from store_states import Opener

    from scalai.store.host import HostStore


@pytest.fixture
def open_store(tmp_path: Path) -> "Iterator[Opener]":
    """Open stores below one directory; they are closed at the end."""
    from scalai.store.host import HostStore

    stores: list[HostStore] = []

    def opener(job: str = "job", host: str = "a") -> HostStore:
        stores.append(HostStore(job, host, tmp_path / "store"))
        return stores[-1]

    yield opener
    for store in stores:
        store.close()


@pytest.fixture
def store(open_store: "Opener") -> "HostStore":
    """An open, empty store."""
    return open_store()
