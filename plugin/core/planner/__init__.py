"""What a layout of a transformer costs, in memory and in time, and which layout is best: ``search``
asks ``memory`` and ``time``, and ``fit`` calibrates the latter by what was measured."""
