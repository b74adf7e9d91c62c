"""The former name of ``cpu_emulation``, for scripts that use it."""

from scalai.patches.megatron.cpu_emulation import install, install_training

__all__ = ["install", "install_training"]
