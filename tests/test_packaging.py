"""Folders and packages, which imports which, and the public names of ``import scalai``."""

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import scalai
from scalai.core import errors

ROOT = Path(__file__).resolve().parents[1]
MAPPED = ("plugin", "configs", "converters", "launch", "patches")


def setuptools_settings() -> dict[str, object]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: dict[str, object] = settings["tool"]["setuptools"]
    return found


def test_scripts_within_tests_import_what_is_there() -> None:
    """Also those that run only on a CUDA device."""
    seen, wrong = 0, []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = str(node.value) if isinstance(node, ast.Constant) else ""
            for module, names in re.findall(
                r"^ *from (scalai[\w.]*) import (\w+(?:, \w+)*)", text, re.M
            ):
                for name in names.split(", "):
                    seen += 1
                    whole = importlib.import_module(module)
                    if not hasattr(whole, name) and not find_spec(f"{module}.{name}"):
                        wrong.append(f"{path.name}: {module} has no {name}")
    assert not wrong and seen > 20


def test_every_folder_with_code_is_a_listed_package() -> None:
    settings = setuptools_settings()
    folders = {str(folder): name for name, folder in dict(settings["package-dir"]).items()}  # type: ignore[call-overload]
    found = set()
    for top in MAPPED:
        for init in (ROOT / top).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / top).parts
            found.add(".".join((folders[top], *inner)))
    assert found == set(settings["packages"])  # type: ignore[call-overload]


ROOMS = {
    "converters/deepspeed": (
        {"plain_layout", "universal_layout", "zero_layout"}, {"model_writer"},
        {"grid", "optimizer_writer"}, {"model_reader", "drafts"}, {""},
        {"cuts", "experts", "pipeline"}, {"flat"},
    ),
    "launch": (
        {"cli"}, {"run"}, {"before_start"}, {"commands"}, {"chaos"}, {"agent"}, {"coordinator"},
        {"config"}, {""},
    ),
}  # fmt: skip
"""Floors of a folder's rooms or files ("": all other files); each may import what comes after."""


@pytest.mark.parametrize("folder", list(ROOMS))
def test_rooms_import_only_what_lies_further_in(folder: str) -> None:
    top, package = ROOT / folder, re.escape("scalai." + folder.replace("/", "."))
    floors = {room: floor for floor, rooms in enumerate(ROOMS[folder]) for room in rooms}
    seen, wrong = set(), []
    for path in top.rglob("*.py"):
        first = path.relative_to(top).parts[0].removesuffix(".py")
        room = first if first in floors else ""
        seen.add(room)
        found = re.findall(rf"^ *from {package}(?:\.(\w+)| import (\w+))", path.read_text(), re.M)
        names = {one or other for one, other in found}
        others = {name if name in floors else "" for name in names} - {room}
        wrong += [(str(path), other) for other in others if floors[other] <= floors[room]]
    assert seen == set(floors)
    assert not wrong


NO_TORCH = (
    "scalai",
    "scalai.core.tensors.plan",
    "scalai.core.job.resize",
    "scalai.core.degrees.choice",
    "scalai.store.host",
    "scalai.runtime.calls",
    "scalai.slabs.slab_file",
    "scalai.converters.megatron.arguments",
    "scalai.launch.commands.inspect",
    "scalai.launch.commands.clean",
    "scalai.launch.commands.job_commands",
    "scalai.launch.commands.plan_layout",
    "scalai.launch.commands.reshard",
    "scalai.launch.commands.verify",
    "scalai.launch.commands.chaos",
    "scalai.launch.cli",
    "scalai.launch.coordinator.process",
    "scalai.launch.coordinator.rendezvous_store",
    "scalai.launch.agent.extension_locks",
    "scalai.patches.versions",
)
"""What offline commands, a job's coordinator and the questions to it consist of: an import of torch
costs each of these processes two seconds of a processor."""

FRAMEWORKS = ("megatron", "deepspeed", "transformers", "accelerate")

AGENT_AND_WORKER = (
    "import scalai.launch.run",
    "import scalai.patches.worker",
    "from scalai.patches import worker_start; worker_start.install()",
)
"""What runs in every agent, and in every worker before its script does."""

NOT_BEFORE_USED = (
    *FRAMEWORKS, "setuptools", "sympy", "networkx", "torch._dynamo", "torch._inductor",
    "torch.distributed.checkpoint", "torch.distributed.tensor", "torch.utils.cpp_extension",
    "scalai.converters.layouts", "scalai.converters.torch_archive",
)  # fmt: skip


def test_what_holds_no_tensor_needs_no_torch_and_no_framework() -> None:
    statements = [f"import {name}" for name in NO_TORCH]
    assert not _brought(statements, ("torch", "setuptools", "safetensors", *FRAMEWORKS))


def test_a_question_to_a_running_job_needs_no_converter() -> None:
    asking = "import contextlib, scalai.launch.cli"
    for command in ("status", "scale", "resume"):
        asking += "\nwith contextlib.suppress(SystemExit):"
        asking += f"\n    scalai.launch.cli.main(['{command}', '--help'])"
    assert not _brought([asking], ("torch", "numpy", "scalai.converters"))


def test_agents_and_workers_import_nothing_before_it_is_used() -> None:
    assert not _brought(AGENT_AND_WORKER, NOT_BEFORE_USED)


def _brought(statements: Sequence[str], unwanted: Sequence[str]) -> dict[str, list[str]]:
    """Run statements one after another in a fresh interpreter; return which of them brought a
    module that is not wanted."""
    code = f"""
import json, sys
brought, unwanted = {{}}, set({tuple(unwanted)!r})
for statement in {tuple(statements)!r}:
    exec(statement)
    found = sorted(unwanted & sys.modules.keys())
    unwanted -= {{*found}}
    if found:
        brought[statement] = found
print(json.dumps(brought))
"""
    found: dict[str, list[str]] = _printed(code)
    return found


def _printed(code: str) -> Any:
    """Run code in a fresh process; return the JSON that it prints last."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("command", ["scalai", "scalai-run"])
def test_the_commands_are_installed_and_explain_themselves(command: str) -> None:
    program = Path(sys.executable).with_name(command)
    done = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: {command}")


# ------------------------------------------------------------------ public names

ERRORS = {
    "AbsentError", "AnswerError", "DamageError", "EndedError", "LayoutError", "MemoryShortError",
    "MessageError", "MismatchError", "PeerError", "ProofError", "RefusedError", "ReplacedError",
    "RoomError", "ScalaiError", "SilentError", "StaleError", "StoreError",
    "UnprovenError", "UsageError", "VersionError",
}  # fmt: skip
PLACES = {
    "current": "scalai.runtime.session",
    "elastic": "scalai.runtime.session",
    "Session": "scalai.runtime.session",
    "OrderedBatches": "scalai.runtime.ordered_batches",
    "Shuffled": "scalai.core.dataset.order",
    "Blend": "scalai.core.dataset.order",
    "BatchRamp": "scalai.core.degrees.batches",
    "MegatronState": "scalai.patches.megatron.megatron_state",
    "DeepSpeedState": "scalai.patches.deepspeed.deepspeed_state",
    "ReplicatedState": "scalai.patches.replicated",
    "Slabs": "scalai.core.tensors.slabs",
    "zig_zag": "scalai.core.tensors.slabs",
    "SlabFile": "scalai.slabs.slab_file",
    "read_slab": "scalai.slabs.slab_file",
    "exchange_halo": "scalai.slabs.halo",
    **dict.fromkeys(ERRORS, "scalai.core.errors"),
}


def test_the_set_of_public_names_is_fixed() -> None:
    """Scripts import these: a name that goes, or comes, is a decision."""
    assert set(scalai.__all__) == set(PLACES) and len(scalai.__all__) == len(PLACES)


def test_every_error_is_public() -> None:
    tree = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, scalai.ScalaiError)
    }
    assert tree == ERRORS


@pytest.mark.parametrize("name", sorted(PLACES))
def test_each_name_is_what_lies_at_its_place(name: str) -> None:
    place = PLACES[name]
    if name in ("MegatronState", "DeepSpeedState"):
        pytest.importorskip({"MegatronState": "megatron.core"}.get(name, "deepspeed"))
    assert getattr(scalai, name) is getattr(importlib.import_module(place), name)
    assert getattr(scalai, name).__module__ == place


def test_an_unknown_name_is_said_to_be_none() -> None:
    with pytest.raises(AttributeError, match=r"'scalai' has no attribute 'Sesion'.*'Session'"):
        scalai.Sesion  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Sesion'"):
        from scalai import Sesion  # type: ignore[attr-defined]  # noqa: F401


def test_the_names_are_listed_and_nothing_is_imported_for_it() -> None:
    code = (
        "import json, sys, scalai\n"
        "listed = sorted({*scalai.__all__} - {*dir(scalai)})\n"
        "brought = {name.partition('.')[0] for name in sys.modules}\n"
        "heavy = brought & {'torch', 'numpy', 'megatron', 'deepspeed', 'transformers'}\n"
        "print(json.dumps([*listed, *heavy, *(n for n in sys.modules if n[:7] == 'scalai.')]))"
    )
    assert _printed(code) == []


def test_errors_are_caught_without_torch() -> None:
    assert not _brought(["from scalai import RefusedError, ScalaiError"], ("torch", "numpy"))


@pytest.mark.parametrize(
    ("name", "framework", "way"),
    [
        ("MegatronState", "megatron", r"scalai[megatron] brings it"),
        ("Session", "torch", "pip install it"),
    ],
)
def test_what_is_not_installed_is_named_with_the_way_out(
    name: str, framework: str, way: str
) -> None:
    code = (
        f"import json, sys\nsys.modules[{framework!r}] = None\nimport scalai\n"
        f"try:\n    scalai.{name}\nexcept ModuleNotFoundError as error:\n"
        "    print(json.dumps([str(error), error.name]))"
    )
    text, missing = _printed(code)
    assert missing.partition(".")[0] == framework
    assert text == f"scalai.{name} needs {missing}, which is not installed here; {way}."
