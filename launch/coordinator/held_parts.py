"""The parts of one generation, or of one snapshot, by host; and what follows from all of them, kept
up to date as hosts come and go."""

from collections import UserDict

from scalai.core.coverage import Cover
from scalai.core.fingerprint import Committed
from scalai.store.generation import contradiction
from scalai.store.manifest import HostManifest


class HeldParts(UserDict[str, HostManifest]):
    """Parts by host, of one state."""

    def __init__(self) -> None:
        self._cover = Cover()
        self._known: dict[str, str] | None = {}
        """By tensor a host that states its fingerprint; None: to be gathered anew."""
        self._hosts: tuple[str, ...] = ()
        """Those that all parts name as who wrote."""
        self._prints: dict[str, int] | None = {}
        """What all parts state; None: to be gathered anew, with ``_hosts``."""
        super().__init__()

    def __setitem__(self, host: str, part: HostManifest) -> None:
        known = self.data.get(host)
        if known is None or known.collection is not part.collection:
            # A part that does not say how many there are is of no whole state.
            self._cover.put(host, part.collection, int(part.about.get("tensors", -1)))
        self.data[host] = part
        if known is not None:
            self._prints = None
        elif self._prints is not None:
            self._gather(part)
        self._known = None if known is not None else self._with(self._known, part)

    def __delitem__(self, host: str) -> None:
        del self.data[host]
        self._cover.remove(host)
        self._known = self._prints = None

    def is_whole(self) -> bool:
        """Whether they hold every element of every tensor, all from one step; pieces may
        overlap."""
        return self._is_of_one_step() and self._cover.is_whole()

    def is_whole_without(self, host: str) -> bool:
        """Whether they would without this host."""
        return self._is_of_one_step() and self._cover.is_whole_without(host)

    def _is_of_one_step(self) -> bool:
        return len({part.step for part in self.data.values()}) == 1

    def contradiction(self, part: HostManifest) -> str | None:
        """Say which of the parts was committed with other fingerprints than this one; None: none
        that is known."""
        if self._known is None:
            self._known = {}
            for each in self.data.values():
                self._with(self._known, each)
        stated = {} if part.committed is None else part.committed.fingerprints
        others = {self._known[name] for name in stated if name in self._known} - {part.host}
        found = (contradiction([self.data[host], part]) for host in sorted(others))
        return next(filter(None, found), None)

    @staticmethod
    def _with(known: dict[str, str] | None, part: HostManifest) -> dict[str, str] | None:
        if known is not None and part.committed is not None:
            for name in part.committed.fingerprints:
                known.setdefault(name, part.host)
        return known

    def stated(self) -> Committed | None:
        """Return what the parts state together."""
        if self._prints is None:
            self._hosts, self._prints = (), {}
            for part in self.data.values():
                self._gather(part)
        return Committed(self._hosts, dict(self._prints)) if self._hosts else None

    def _gather(self, part: HostManifest) -> None:
        assert self._prints is not None
        if part.committed is None:
            return
        self._prints.update(part.committed.fingerprints)
        if part.committed.hosts is not self._hosts:  # usually all parts name the same
            self._hosts = tuple(sorted({*self._hosts, *part.committed.hosts}))
            if self._hosts == part.committed.hosts:
                self._hosts = part.committed.hosts
