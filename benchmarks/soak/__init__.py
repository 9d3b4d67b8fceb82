"""What long runs and many models leave behind."""
