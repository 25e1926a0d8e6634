"""Plug-ins for the programs that serve the models; each needs that program installed, and is imported on its own."""
