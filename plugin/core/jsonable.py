"""What goes through JSON: messages between processes, manifests, reports."""

from typing import Any

Json = Any
"""Whatever ``json.dumps`` writes: dicts with string keys, lists, strings, numbers, booleans,
None."""
