"""The kernel's table of mounts."""

import os
from pathlib import Path

import pytest

from scalai.vfs import mounts
from scalai.vfs.mounts import Mount, find_mount, mount_of


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


def test_a_path_below_a_mount_lies_in_it_also_by_a_link_and_not_below_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        f"44 27 0:40 / {tmp_path} rw - ext4 /dev/a rw\n"
        f"45 27 0:41 / {tmp_path}/point ro - fuse.scalai scalai:x ro\n"
        f"46 45 0:42 / {tmp_path}/point/other rw - tmpfs tmpfs rw\n"
    )
    monkeypatch.setattr(mounts, "_TABLE", table)
    (tmp_path / "point").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "point")
    mount = Mount(tmp_path / "point", "fuse.scalai", "scalai:x")
    for path in ("point", "point/dataset/c", "link/dataset/c", "a/../point/c"):
        assert mount_of(tmp_path / path) == mount, path
    for path in ("pointed/c", "c", "point/other/c"):
        assert mount_of(tmp_path / path) is None, path
