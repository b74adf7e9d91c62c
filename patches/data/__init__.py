"""Data loaders of torch and DeepSpeed with one order of samples in any layout."""
