"""Where jobs of the tests train: on CUDA devices where there are any, else on the CPU."""

import torch

ACCELERATOR = "cuda" if torch.cuda.is_available() else "cpu"
"""As ``DS_ACCELERATOR`` names it."""
BACKEND = "nccl" if torch.cuda.is_available() else "gloo"
"""As torch and Megatron-LM name it."""
