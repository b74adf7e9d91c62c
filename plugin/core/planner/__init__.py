"""Costs of a transformer's layouts in memory and time, and the search for the best layout.

``search`` uses ``step_memory`` and ``step_time``; ``fit`` calibrates the latter by measurements.
"""
