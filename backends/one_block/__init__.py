"""One block of queries and keys: the definition, torch's own call, and decoding."""
