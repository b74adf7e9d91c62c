"""Megatron's layouts: ``torch_dist`` in all forms of the optimizer, and the legacy ``torch``."""
