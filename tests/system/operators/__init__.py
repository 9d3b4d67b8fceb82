"""Each operator and module of torch's own database, inside a DDP model that is cut around it."""
