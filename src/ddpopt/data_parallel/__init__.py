"""One process, several devices."""
