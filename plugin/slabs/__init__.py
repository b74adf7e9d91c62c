"""Large samples of which each rank has a slab: reading a slab's bytes alone from a file, and the
exchange of halos between ranks. How a sample is cut is in ``core/tensors/slabs.py``."""
