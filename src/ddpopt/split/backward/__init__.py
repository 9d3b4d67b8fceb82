"""The split of the backward graph alone."""
