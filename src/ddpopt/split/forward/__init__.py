"""The split of the forward graph."""
