"""Callbacks for trainers of other packages, each in a module that alone imports that package."""
