"""Build ``build/links/scalai``: the import layout as directory links, for mypy and pyright only.

Type checkers read folders, not import hooks, so they cannot follow the
``package-dir`` mapping in ``pyproject.toml``. Run ``python tests/link_tree.py``
after a clone and after adding a file or folder directly under ``plugin/``.
"""

import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def build_link_tree(root: Path = ROOT) -> Path:
    """Recreate the links and return the folder to put on the search path."""
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    links = root / "build" / "links"
    shutil.rmtree(links, ignore_errors=True)
    for module, folder in settings["package-dir"].items():
        package = links.joinpath(*module.split("."))
        for source in sorted((root / folder).rglob("*")):
            if source.is_file() and source.suffix in {".py", ".pyi", ".typed"}:
                link = package / source.relative_to(root / folder)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(source)
    return links


if __name__ == "__main__":
    print(build_link_tree())
