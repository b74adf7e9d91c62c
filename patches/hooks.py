"""Which frameworks are hooked when a job is elastic, before the script imports any of them."""

import importlib.util

from scalai.runtime import session


def install() -> None:
    """Hook what is installed. Imports no framework: the hooks act when the script imports it."""
    if importlib.util.find_spec("megatron") is None:
        return
    from scalai.patches.megatron import rehearsal, training

    rehearsal.install()
    rehearsal.install_training()
    training.install(session.elastic)
