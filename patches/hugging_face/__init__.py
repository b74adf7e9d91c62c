"""Hooks of transformers' Trainer and of Accelerate, on those of DeepSpeed."""
