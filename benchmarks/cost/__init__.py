"""What ddpopt itself costs: cutting, gates, sections, planning, recording."""
