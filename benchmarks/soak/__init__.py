"""What a long run leaves behind."""
