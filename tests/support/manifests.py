"""The manifests of examples/kubernetes, and what kustomize makes of them: resources, patches by
strategic merge, images, and ConfigMaps from files (their names without the digest)."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
BASE, GPU, TRAINER = FOLDER / "base", FOLDER / "overlays" / "gpu", FOLDER / "trainer"
AUTOSCALER = FOLDER / "autoscaler"

Objects = dict[tuple[str, str], dict[str, Any]]
"""Manifests by kind and name."""
MERGED = {"containers", "volumes", "env", "volumeMounts"}
"""Lists of which a patch changes entries of the same name; others it replaces."""


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Documents of a file."""
    yield from filter(None, yaml.safe_load_all(path.read_text()))


def built(folder: Path) -> Objects:
    """As ``kubectl kustomize FOLDER``."""
    (custom,) = read(folder / "kustomization.yaml")
    found: Objects = {}
    for name in custom.get("resources", []):
        path = folder / name
        found |= built(path) if path.is_dir() else {_key(each): each for each in read(path)}
    for generator in custom.get("configMapGenerator", []):
        data = {name: (folder / name).read_text() for name in generator["files"]}
        made = {
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]},
            "data": data,
        }  # fmt: skip
        found[_key(made)] = made
    for patch in custom.get("patches", []):
        for each in read(folder / patch["path"]):
            found[_key(each)] = _merged(found[_key(each)], each)
    for image in custom.get("images", []):
        for each in found.values():
            for container in _containers(each):
                if container["image"] == image["name"]:
                    container["image"] = f"{image['newName']}:{image['newTag']}"
    return found


def job_of(objects: Objects) -> dict[str, Any]:
    (job,) = (each for (kind, _), each in objects.items() if kind == "Job")
    return job


def flags_of(container: Mapping[str, Any]) -> dict[str, str]:
    """Values of the flags of ``scalai-run`` in a container's arguments."""
    words = [word for word in container["args"] if word.startswith("--")]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def bytes_of(quantity: str) -> int:
    """A quantity of memory such as 4Gi."""
    powers = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}
    return int(quantity[:-2]) << powers[quantity[-2:]]


def _key(manifest: Mapping[str, Any]) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _containers(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    spec = manifest.get("spec", {}).get("template", {}).get("spec", {})
    found: list[dict[str, Any]] = spec.get("containers", [])
    return found


def _merged(before: dict[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(before)
    for key, value in patch.items():
        if isinstance(value, Mapping):
            made[key] = _merged(before.get(key, {}), value)
        elif key in MERGED:
            entries = {each["name"]: each for each in before.get(key, [])}
            for each in value:
                entries[each["name"]] = _merged(entries.get(each["name"], {}), each)
            made[key] = list(entries.values())
        else:
            made[key] = value
    return made
