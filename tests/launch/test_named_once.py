"""A join has each list of hosts once, however many states its host holds."""

from dataclasses import replace
from pathlib import Path

import pytest

from scalai.core.errors import UsageError
from scalai.core.tensors.fingerprint import CommitStatement
from scalai.launch.coordinator.calls import BroughtPart, HostLists, read_part
from scalai.store.manifest import manifest_bytes
from scalai.store.parts import summary
from support.committed_parts import part

HOSTS = tuple(f"node-{number:04d}.rack-{number % 64:02d}" for number in range(2048))


def test_parts_arrive_with_the_hosts_that_they_named_and_each_list_travels_once(
    tmp_path: Path,
) -> None:
    sealed = summary(part(tmp_path, "a", -1, 30, "r-1-30", hosts=list(HOSTS)))
    held = [
        replace(sealed, generation=number, committed=CommitStatement(HOSTS, {"w": 5}))
        for number in (1, 2)
    ]
    plain = replace(sealed, about={k: v for k, v in sealed.about.items() if k != "hosts"})
    lists = HostLists()
    travelling = lists.take(manifest_bytes(each) for each in (sealed, *held, plain))
    assert lists.lists == (HOSTS,)
    assert not any(HOSTS[7].encode() in each.manifest for each in travelling)
    arrived = [read_part(each, lists.lists, "a") for each in travelling]
    sent = [sealed, *held, plain]
    assert all(a.to_json() == b.to_json() for a, b in zip(arrived, sent, strict=True))
    one, other = arrived[1], arrived[2]
    assert one.about["hosts"] is other.about["hosts"], "one copy for all parts of all hosts"
    assert one.committed is not None and other.committed is not None
    assert one.committed.hosts is other.committed.hosts


@pytest.mark.parametrize("place", [1, -2])
def test_a_list_that_is_not_there_is_refused_by_name(tmp_path: Path, place: int) -> None:
    manifest = manifest_bytes(part(tmp_path, "a", 1, 30, "r-1-30"))
    with pytest.raises(UsageError, match=f"a part of a names list {place} of 1 lists of hosts"):
        read_part(BroughtPart(manifest, place, -1), (HOSTS,), "a")
