"""Parallel degrees of a job: the valid ones, and the choice among them."""
