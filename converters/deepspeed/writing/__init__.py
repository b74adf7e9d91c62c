"""Lays out what a DeepSpeed job loads at any stage: its ranks, and the files of each."""
