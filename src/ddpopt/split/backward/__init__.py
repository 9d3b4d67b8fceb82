"""The split of the backward graph only."""
