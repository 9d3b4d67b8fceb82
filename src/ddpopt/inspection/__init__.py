"""Looking at what was decided. The core never imports this package."""
