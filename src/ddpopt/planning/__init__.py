"""From what a graph and a Reducer are like to a plan. Pure: no graph and no process group here."""
