"""For all tests: the package ``support``, pools of workers, stores in a temporary directory."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)
# For what tests start: scripts of ``support``, and workers that import it.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))

if TYPE_CHECKING:
    from scalai.store.host import HostStore
    from support.store_states import Opener
    from support.training.worker_pool import WorkerPool


def pytest_configure(config: pytest.Config) -> None:
    from support.last_resort import LastResort
    from support.turns import TakingTurns

    config.pluginmanager.register(TakingTurns(config), "turns")
    config.pluginmanager.register(LastResort(), "last resort")
    if config.pluginmanager.has_plugin("xdist"):
        from support.spread import Spreading

        config.pluginmanager.register(Spreading(), "spreading")


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


@pytest.fixture(scope="session")
def pool() -> "Iterator[WorkerPool]":
    """Four processes with megatron that live as long as the test session."""
    from support.training.worker_pool import WorkerPool

    workers = WorkerPool(size=4)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def deepspeed_pool() -> "Iterator[WorkerPool]":
    """Four processes with DeepSpeed that live as long as the test session."""
    from support.training.worker_pool import WorkerPool

    workers = WorkerPool(size=4, trainer="tiny_deepspeed")
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def rounds_pool() -> "Iterator[WorkerPool]":
    """Three processes that fork the ranks of scripts under the hooks of an elastic job."""
    from support.training.worker_pool import WorkerPool

    workers = WorkerPool(size=3, trainer="rounds_worker")
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def compiled_cpu_adam() -> None:
    """DeepSpeed's Adam for the CPU can be used at once."""
    from support.compiled import compile_op

    compile_op("CPUAdamBuilder", "cpu_adam")


@pytest.fixture(scope="session")
def compiled_shared_memory() -> None:
    """What DeepSpeed's processes of one machine talk by on the CPU can be used at once."""
    from support.compiled import compile_op

    compile_op("ShareMemCommBuilder", "deepspeed_shm_comm")


@pytest.fixture(autouse=True)
def _renewed_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Take other processes for the next test where those of a pool have grown heavy."""
    yield
    for name in {"pool", "deepspeed_pool"} & set(request.fixturenames):
        request.getfixturevalue(name).renew()
