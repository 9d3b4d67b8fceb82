"""Reading a graph for the planner, and cutting it where the plan says."""
