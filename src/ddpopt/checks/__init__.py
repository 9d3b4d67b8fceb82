"""Before a long run."""
