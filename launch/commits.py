"""The agent's part in a commit: what was sealed gets its number; where the store has no room for
that, it is tried again."""

import logging
from collections.abc import Callable

from scalai.core.errors import ScalaiError
from scalai.core.jsonable import Json
from scalai.launch.generations import deposit_name
from scalai.runtime.failpoints import reached
from scalai.store.committed import Committed
from scalai.store.deposit import Deposit
from scalai.store.host import HostStore

log = logging.getLogger(__name__)


class Commits:
    """Commits of one host. Only the agent's own thread calls it.

    Args:
        store: This host's.
        tell: Tells the coordinator of an event.
        fail: Tells it that the present round cannot go on.
    """

    def __init__(
        self, store: HostStore, tell: Callable[..., None], fail: Callable[[str], None]
    ) -> None:
        self._store, self._tell, self._fail = store, tell, fail
        self._late: dict[int, tuple[str, Committed | None]] = {}
        """Deposits and statements by generation, for which there has been no room."""

    def commit(self, generation: int, deposit: str, committed: Json) -> None:
        """Make the sealed deposit of this name the generation of this number, and tell of it."""
        reached("commit")
        stated = None if committed is None else Committed.from_json(committed)
        self._late[generation] = deposit, stated
        if self._is_done(generation, deposit):
            self._done(generation)
        elif deposit in self._sealed():
            self._try(generation, logging.ERROR)
        else:
            del self._late[generation]
            self._fail(
                f"generation {generation} cannot be committed here: deposit {deposit!r} is not "
                f"sealed in {self._store.directory}, but {sorted(self._sealed())}"
            )

    def forget(self) -> None:
        """The job goes on without this host: what has a number and is not committed is told as
        sealed when it joins again, and the coordinator says what becomes of it."""
        self._late.clear()

    def retry(self) -> None:
        """Commit what there was no room for, where there is some now. Called now and then."""
        for generation in list(self._late):
            self._try(generation, logging.DEBUG)

    def _try(self, generation: int, level: int) -> None:
        deposit, stated = self._late[generation]
        sealed = self._sealed().get(deposit)
        try:
            if sealed is not None:
                self._store.commit(sealed, generation, stated)
                self._done(generation)
        except (ScalaiError, OSError) as error:
            log.log(level, "event=late_commit generation=%d: %s", generation, error)

    def _done(self, generation: int) -> None:
        del self._late[generation]
        reached("committed")
        self._tell("committed", generation=generation)

    def _sealed(self) -> dict[str, Deposit]:
        return {deposit_name(manifest): sealed for sealed, manifest in self._store.sealed()}

    def discard(self) -> None:
        """Give up what was sealed and not committed, but for what has a number: the job goes on
        without it."""
        kept = {deposit for deposit, _ in self._late.values()}
        for name, sealed in self._sealed().items():
            if name not in kept:
                self._store.discard(sealed)
        self._store.set_damaged_aside()

    def _is_done(self, generation: int, deposit: str) -> bool:
        is_there = generation in self._store.generations()
        return is_there and deposit_name(self._store.manifest(generation)) == deposit
