"""A plan carried out: what each rank computes, and what it sends and receives."""
