"""The agent of a host: performs the decisions of the host's law."""
