"""Divides one graph so that DDP communicates in its backward; `compiler.py` takes the steps."""
