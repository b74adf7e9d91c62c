"""Files behind URLs, by fsspec: whole or not at all, and each wait has an end."""
