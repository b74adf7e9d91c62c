"""Data loaders of torch and DeepSpeed whose order of samples does not depend on the layout."""
