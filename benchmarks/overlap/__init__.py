"""How well communication overlaps computation, beside every peer, and with tuned buckets."""
