"""Which frameworks are hooked when a job is elastic, before the script imports any of them."""

import importlib.util


def install() -> None:
    """Hook what is installed. Imports no framework; the hooks act when the script imports it."""
    if importlib.util.find_spec("megatron") is not None:
        from scalai.patches.megatron import rehearsal

        rehearsal.install()
        if importlib.util.find_spec("megatron.training") is not None:
            rehearsal.install_training()
