"""Weights that are not on the device all the time: where they lie, and the slots they come into."""
