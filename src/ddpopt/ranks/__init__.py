"""What ranks compare, and how they wait for each other."""
