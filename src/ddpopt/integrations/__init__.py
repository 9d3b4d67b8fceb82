"""Callbacks for other packages' trainers; only the module of each imports its package."""
