"""Models and ways of training them on two ranks: one row each, with DDP compiled and eager."""
