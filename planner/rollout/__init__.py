"""Rollouts: a version of a model goes to devices in waves, and stops by itself where it fails."""
