"""Measuring: what machine this is, how long a step takes, and a file that says both."""
