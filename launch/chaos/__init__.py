"""Faults that are injected into a running job, and what becomes of them."""
