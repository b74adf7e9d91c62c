"""Each rank's part of a model in a DeepSpeed job: flat buffers, cuts, stages, experts."""
