"""What ddpopt itself costs: compiling, planning and cutting, and sections at run time."""
