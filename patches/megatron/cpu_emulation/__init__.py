"""CPU emulation: Megatron on a machine without CUDA, over gloo, by runtime patching only."""

from scalai.patches.megatron.cpu_emulation.install import install, install_training

__all__ = ["install", "install_training"]
