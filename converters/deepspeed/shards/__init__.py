"""Which part of a model each rank of a DeepSpeed job has: flat buffers, cuts, stages, experts."""
