"""A durable directory that all hosts of a simulated job share."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from scalai.core.messages import commands
from scalai.core.messages.reports import Archived
from scalai.core.tensors.collection import Tensor
from scalai.store.manifest import HostManifest
from scalai.store.parts import snapshot_name
from support.simulated_workers import TENSORS

if TYPE_CHECKING:
    from support.simulated_host import SimulatedHost


@dataclass(slots=True)
class SimulatedDisk:
    """Parts by generation and host: those that are shown, and those that are written only."""

    shown: dict[int, dict[str, HostManifest]] = field(default_factory=dict)
    hidden: dict[int, dict[str, HostManifest]] = field(default_factory=dict)
    is_full: bool = False

    def obey(
        self, host: "SimulatedHost", command: commands.Archive | commands.FinishArchive
    ) -> None:
        """Do what a host is told, and have it report that."""
        number, order, reason = command.generation, command.order, ""
        part = host.store.get(number)
        if isinstance(command, commands.FinishArchive):
            self._show(number)
        elif self.is_full or part is None:
            reason = "the disk is full" if self.is_full else "it is gone"
        else:
            self.hidden.setdefault(number, {})[host.name] = part
        host.unsent.append(Archived(order, 16, reason))

    def _show(self, number: int) -> None:
        self.shown.setdefault(number, {}).update(self.hidden.pop(number, {}))

    def attach(self, host: "SimulatedHost") -> None:
        """A host looks at it, and makes what is shown its own. Where one part is shown, all have
        been written."""
        for number in self.shown:
            self._show(number)
        for one, tensors in self.states():
            mine = host.store.get(one.generation)
            if mine is not None and snapshot_name(mine) == snapshot_name(one):
                tensors |= {tensor.name: tensor for tensor in mine.collection.tensors}
            made = host.manifest(one.step, tensors.values(), dict(one.about), one.ranks)
            made = replace(made, generation=one.generation, committed=one.committed)
            host.store[one.generation] = made

    def retire(self, before: int) -> None:
        for entry in (self.shown, self.hidden):
            for number in [n for n in entry if n < before]:
                del entry[number]

    def states(self) -> Iterator[tuple[HostManifest, dict[str, Tensor]]]:
        """Yield each generation: a part of it that says what it is, and all tensors of it."""
        for number, parts in sorted(self.shown.items()):
            one = replace(next(iter(parts.values())), generation=number)
            yield one, {t.name: t for part in parts.values() for t in part.collection.tensors}

    def check(self) -> None:
        """What is shown is whole, and of one state."""
        for one, tensors in self.states():
            names = {snapshot_name(part) for part in self.shown[one.generation].values()}
            assert len(names) == 1, f"generation {one.generation} is of {names}"
            assert len(tensors) == len(TENSORS), f"generation {one.generation} is not whole"
