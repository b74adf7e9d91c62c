"""Which samples a job has trained on: ``intervals`` of places in a pass over its data, what steps
have ``drawn``, the ``ledger`` that each generation carries, and what it proves (``verdict``); and
the ``own_order`` of loops of one's own, with the places of its ``global_batches``."""
