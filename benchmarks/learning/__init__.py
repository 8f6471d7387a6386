"""What learning gains over every rival, on device files and workloads after TOP's; see `__main__`.

`workloads` says what arrives where, `contestants` evaluates rivals and policies, `pair` does one device and
workload, resumable, and `__main__` all of them.
"""
