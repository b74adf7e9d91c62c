"""DeepSpeed under hooks: the live state of an engine, its checkpoints, its scripts."""
