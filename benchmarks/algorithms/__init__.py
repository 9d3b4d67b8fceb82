"""What algorithms that communicate less save, and where training with them ends."""
