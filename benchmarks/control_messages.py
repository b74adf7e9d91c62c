"""What the control plane's benchmark knows of a start's messages: how a host plans from the source
list of a ``Start``, what it makes of a ``Commit``, and what it reports to have fetched. Where these
messages change, this changes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from control_layout import fingerprints

from scalai.core.host.state import Want
from scalai.core.messages.commands import Commit
from scalai.core.tensors.collection import Collection
from scalai.core.tensors.fingerprint import CommitStatement
from scalai.core.tensors.holders import Holder, SourceList, used_only
from scalai.core.tensors.plan import plan
from scalai.core.tensors.region import whole
from scalai.launch.agent.sources import ask_parts, own_part
from scalai.store.manifest import HostManifest, StoredFile
from scalai.store.moves import holders_of
from scalai.store.parts import Extras, extended, summary_bytes


def ask_and_plan(
    listed: SourceList, store: Any, wants: Mapping[int, Want], group: Sequence[str], token: bytes
) -> int:
    """Ask the hosts that hold what a host wants for their pieces, and plan. Returns how many
    said them."""
    targets = [Holder(store.host, wants[rank].pieces, rank) for rank in sorted(wants)]
    own = own_part(store, listed)
    parts = ask_parts(own, store.host, listed, targets, token, group.index(store.host))
    assert not parts.silent, parts.silent
    plan(holders_of(parts.all), targets, group)
    return len(parts.others)


def committed(sealed: HostManifest, command: Commit) -> HostManifest:
    """Return what a sealed part becomes by its commit."""
    return replace(sealed, generation=command.generation, committed=command.committed)


def grown(part: HostManifest, fetched: Collection) -> bytes | None:
    """Return the summary of a host's part with what it has fetched, as it reports it."""
    if not len(fetched):
        return None
    sizes, fetched = fetched.size_bytes(), used_only(fetched)
    file = StoredFile(f"fetched-{len(part.files)}.safetensors", int(sizes.sum()))
    whole_ones = Collection.of((tensor, whole(tensor.shape)) for tensor in fetched.tensors)
    names = [tensor.name for tensor in fetched.tensors]
    stated = dict(zip(names, fingerprints(whole_ones).tolist(), strict=True))
    assert part.committed is not None
    beside = Extras({}, {}, (), CommitStatement(part.committed.hosts, stated))
    begins = np.cumsum(sizes) - sizes
    return summary_bytes(extended(part, file, fetched, begins, fingerprints(fetched), beside))
