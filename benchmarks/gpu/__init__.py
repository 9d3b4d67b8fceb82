"""One command that proves ddpopt on a GPU, and its twin that runs the same lines on the CPU."""
