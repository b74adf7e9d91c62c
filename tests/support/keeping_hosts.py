"""Hosts that keep replicas for each other, with stores and data planes, and without workers."""

from collections.abc import Mapping

import numpy as np

from scalai.core.messages.commands import Replicate
from scalai.core.messages.shared import Shared
from scalai.core.messages.worker_messages import RankSnapshot
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.fingerprint import piece_fingerprint
from scalai.core.tensors.region import Box
from scalai.core.tensors.replicas import ring_of
from scalai.launch.agent.data_plane import DataPlaneServer
from scalai.launch.agent.replica_rate import ReplicaRate
from scalai.launch.agent.replicas import Kept, Replicas
from scalai.store.manifest import HostManifest
from support.listed import listed
from support.store_states import Opener
from support.wire import travelled

TOKEN = b"token"
HOSTS = "abc"


class KeepingHosts:
    """Three hosts, of which each holds a third of every tensor, and keeps that of the one before
    it; ``rates``: how fast, by host."""

    def __init__(self, open_store: Opener, rates: Mapping[str, ReplicaRate] | None = None) -> None:
        self.stores = {host: open_store(host=host) for host in HOSTS}
        self.servers = {host: DataPlaneServer(s, TOKEN) for host, s in self.stores.items()}
        rates = rates or {}
        self.keepers = {h: Replicas(store, TOKEN, rates.get(h)) for h, store in self.stores.items()}
        self.parts: dict[str, HostManifest] = {}
        self._orders = 0

    def write(self, number: int, content: Mapping[Tensor, int], order: str = HOSTS) -> None:
        """Commit a generation: each element is its place and the ``content`` of its tensor;
        ``order``: which host holds which third."""
        for host, store in self.stores.items():
            third = order.index(host)
            rows = [
                (t, Box((third * t.shape[0] // 3, 0), (t.shape[0] // 3, t.shape[1])))
                for t in content
            ]
            held = Collection.of(rows)
            slot = store.reserve({third: held})
            path = slot.directory / slot.files[0].name
            data, prints = b"", []
            for tensor, box in rows:
                values = np.arange(box.numel, dtype=np.float32) + box.offset[0] * box.shape[1]
                values = (values + content[tensor]).reshape(box.shape)
                prints.append(piece_fingerprint(values.view(np.uint32), box, tensor.shape))
                data += values.tobytes()
            path.write_bytes(path.read_bytes()[: -len(data)] + data)
            about = {
                "consumed_samples": 1,
                "world_size": 3,
                "tensors": len(content),
                "snapshot": f"r-{number}",
            }
            part = RankSnapshot(tuple(prints), f"dp{third}", {"lr": 1}, {"seed": third})
            store.seal(slot, step=number, about=about, parts={third: part})
            self.parts[host] = store.commit(slot, number)

    def command(self) -> Replicate:
        """Return the next order to make replicas."""
        ring = ring_of(dict.fromkeys(HOSTS, ""), 1)
        addresses = {name: server.address for name, server in self.servers.items()}
        self._orders += 1
        return Replicate(self._orders, listed(self.parts, addresses, ranks=3), Shared(ring))

    def keep(self, host: str = "b") -> Kept:
        """Have a host keep what it is to, and check all that it has then."""
        command = self.command()
        self.keepers[host].begin(command.order)
        kept = self.keepers[host].keep(travelled(command))
        with self.stores[host].open_rows(self.parts[host].generation) as rows:
            assert not list(rows.damage())
        return kept

    def close(self) -> None:
        for server in self.servers.values():
            server.close()

    def kept_file(self, number: int, host: str = "b") -> str:
        (found,) = self.stores[host].generation_directory(number).glob("fetched-*")
        return str(found)
