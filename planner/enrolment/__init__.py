"""Enrolment: what a stranger may ask of a planner, over TLS, answered through a process of its own.

    stranger -- TLS --> listener (child process) -- private channel --> service (thread) --> desk --> store

The listener bounds connections, bytes and time, and knows neither the database nor any secret but the
certificate's key. What ends or exhausts it ends enrolment only; the service starts it again.
"""
