"""Figures from telemetry rows, for people and for triggers."""
