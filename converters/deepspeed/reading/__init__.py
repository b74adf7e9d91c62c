"""Reads a DeepSpeed job's state at any stage, and unites its model-parallel ranks."""
