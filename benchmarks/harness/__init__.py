"""What the measurements share: an emulated cluster, processes that take turns, models."""
