"""The agent of a host: it carries out what the law of the host decides."""
