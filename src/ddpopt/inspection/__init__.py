"""Inspection of what was decided. The core never imports this package."""
