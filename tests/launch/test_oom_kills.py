"""What the kernel has counted of processes that it killed for want of memory."""

from pathlib import Path

import pytest

from scalai.launch.agent.oom_kills import describe_rise, oom_kills

pytestmark = pytest.mark.fault


def made(folder: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "cgroup", folder / "proc"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"proc/self/cgroup": "0::/job/a\n", "cgroup/job/a/memory.events": "oom 3\noom_kill 2\n",
          "proc/vmstat": "pgfault 9\noom_kill 5\n"}, {"cgroup": 2, "machine": 5}),
        ({"proc/self/cgroup": "0::/\n", "cgroup/memory.events": "oom_kill 1\n"}, {"cgroup": 1}),
        ({"proc/self/cgroup": "4:cpu:/\n9:memory:/d/x\n",
          "cgroup/memory/d/x/memory.oom_control": "under_oom 0\noom_kill 4\n"}, {"cgroup": 4}),
        ({"proc/vmstat": "oom_kill 7\n"}, {"machine": 7}),
        ({"proc/vmstat": "nothing of it\n"}, {}),
    ],
)  # fmt: skip
def test_counts_are_read_where_they_are(
    tmp_path: Path, files: dict[str, str], found: dict[str, int]
) -> None:
    assert oom_kills(*made(tmp_path, files)) == found


def test_a_rise_is_told_and_no_other_change() -> None:
    said = describe_rise({"cgroup": 1, "machine": 1}, {"cgroup": 2, "machine": 9})
    assert said == "out of host memory: this cgroup's count of oom_kill rose by 1"
    assert "machine's count of oom_kill rose by 3" in describe_rise({"machine": 1}, {"machine": 4})
    assert describe_rise({"cgroup": 1}, {"cgroup": 1}) == ""
    assert describe_rise({}, {"cgroup": 7}) == "", "it is not known what was before"


def test_this_machine_is_read_without_an_error() -> None:
    assert all(count >= 0 for count in oom_kills().values())
