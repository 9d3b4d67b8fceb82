"""Which buckets are best."""
