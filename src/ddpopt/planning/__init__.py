"""From what a graph, a Reducer and a network are like to plans. No process group here."""
