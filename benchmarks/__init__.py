"""Measurements of ddpopt's own cost; each file is a program that prints one table."""
