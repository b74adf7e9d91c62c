"""The parallelizable tensor collection: its tensors, cuts, holders and plans."""
