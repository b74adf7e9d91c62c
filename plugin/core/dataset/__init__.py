"""The samples of a job: the global ``order``, the places ``drawn`` by steps, as ``intervals``, the
``ledger`` of each generation with its proof, ``step_lines`` of ranks beside it, and the ``table``
of data sets."""
