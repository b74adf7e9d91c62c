"""Reads what a DeepSpeed job keeps at any stage, and puts its model-parallel ranks together."""
