"""What tests share; ``tests`` is on the search path of every process that they start."""
