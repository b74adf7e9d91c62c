"""The kernel's table of mounts."""

import os
from pathlib import Path

import pytest

from scalai.vfs import mounts
from scalai.vfs.mounts import Mount, find_mount


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "a b",
        "a\u3000b",
        "a\u00a0b",
        "a\u2028b",
        "a\u0085b",
        "a\tb\nc\\d",
        "\udcff",
        "a - b",
    ],
)
def test_a_mount_point_of_any_name_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    quoted = os.fsencode(name)
    for each in b"\\", b" ", b"\t", b"\n":  # as the kernel does
        quoted = quoted.replace(each, b"\\%03o" % each[0])
    lines = [b"44 27 0:40 / / rw - overlay overlay rw",
             b"45 27 0:41 / /data/%s ro shared:1 - fuse.scalai scalai:x ro" % quoted]  # fmt: skip
    table = tmp_path / "mountinfo"
    table.write_bytes(b"".join(line + b"\n" for line in lines))
    monkeypatch.setattr(mounts, "_TABLE", table)
    point = Path("/data", name)
    assert find_mount(point) == Mount(point, "fuse.scalai", "scalai:x")
    assert find_mount(Path("/data")) is None
