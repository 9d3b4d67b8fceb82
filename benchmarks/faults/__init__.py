"""What becomes of training when a rank, its process or its link fails."""
