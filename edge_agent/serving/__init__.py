"""The Open Inference Protocol, version 2, for clients that know Triton or KServe: HTTP and gRPC.

It runs in a process of its own, and only where it is asked for. To the agent it is an application like any
other.
"""
