"""Many elastic jobs on one set of devices: who gets what, by which policy, and a simulator.

``question`` has the question and its answer, ``policies`` the registry of policies, ``speeds`` the
rates that a job's own steps predict, and ``simulator`` runs a workload under a policy.
"""
