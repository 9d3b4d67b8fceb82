"""Finds the best buckets."""
