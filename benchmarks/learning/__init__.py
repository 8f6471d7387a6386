"""What learning gains over rivals and unlearned seeds, on TOP's devices and workloads; see `__main__`.

`workloads` says what arrives where, `contestants` evaluates rivals and policies, `pair` does one device and
workload, resumable, `__main__` all of them, and `table` prints what was kept.
"""
