"""Divides one graph so that DDP communicates in its backward: facts, plan, cut, compile, run."""
