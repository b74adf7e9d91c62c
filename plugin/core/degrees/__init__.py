"""Parallel degrees of a job: which are valid, and the choice among them."""
