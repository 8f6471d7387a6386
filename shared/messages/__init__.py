"""Typed messages: one module per conversation."""
