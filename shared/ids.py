"""Identifiers with types of their own, so that a swapped argument does not type-check."""

from typing import NewType

OpId = NewType("OpId", int)
"""Index of an operator in its graph, or in a combined block's numbering."""

TensorId = NewType("TensorId", int)
"""Index of a tensor in its graph."""

StreamId = NewType("StreamId", int)
"""A stream inside one step: 0 is the lane's own."""

TaskId = NewType("TaskId", int)
"""A task inside one life of an engine process."""

StepId = NewType("StepId", int)
"""An issued step; ids rise in issue order within one life of an engine process."""

DeviceId = NewType("DeviceId", str)
"""The name a device was enrolled under; the identity behind its CURVE key."""

Digest = NewType("Digest", str)
"""BLAKE2b-256 in lower-case hexadecimal, 64 characters (32 bytes on the wire)."""
