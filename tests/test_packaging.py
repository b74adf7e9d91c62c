"""The mapping of folders to packages, and what an import of Scalai does not need."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAPPED = ("plugin", "configs", "converters", "launch", "patches")


def setuptools_settings() -> dict[str, object]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: dict[str, object] = settings["tool"]["setuptools"]
    return found


def test_every_folder_with_code_is_a_listed_package() -> None:
    settings = setuptools_settings()
    folders = {str(folder): name for name, folder in dict(settings["package-dir"]).items()}  # type: ignore[call-overload]
    found = set()
    for top in MAPPED:
        for init in (ROOT / top).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / top).parts
            found.add(".".join((folders[top], *inner)))
    assert found == set(settings["packages"])  # type: ignore[call-overload]


def modules_after(statement: str) -> set[str]:
    """Run a statement in a fresh interpreter; return the top-level modules that it loaded."""
    code = f"{statement}; import sys; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import scalai",
        "import scalai.core.plan, scalai.core.resize, scalai.core.choice",
        "import scalai.store.host",
        "import scalai.converters.megatron.arguments",
        "import scalai.launch.inspect, scalai.launch.clean",
        "import scalai.launch.cli, scalai.launch.reshard, scalai.launch.verify",
    ],
)
def test_what_works_offline_needs_no_torch_and_no_framework(statement: str) -> None:
    assert not modules_after(statement) & {"torch", "megatron", "deepspeed"}


@pytest.mark.parametrize("command", ["scalai", "scalai-run"])
def test_the_commands_are_installed_and_explain_themselves(command: str) -> None:
    program = Path(sys.executable).with_name(command)
    done = subprocess.run([program, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: {command}")
