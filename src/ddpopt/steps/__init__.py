"""Watching a training step: when forwards run, sections run, gradients arrive and backwards end.

Who wants to know subscribes; nothing here knows by name who that is.
"""
