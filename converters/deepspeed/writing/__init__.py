"""Lays out a DeepSpeed job's ranks and their files, at any stage."""
