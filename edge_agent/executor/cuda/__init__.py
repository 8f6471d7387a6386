"""What executors on a CUDA device share: few streams, proven memory, recipes and programs, steps by events.

From pure to impure: `memory_plan`, `layout`, `streams` and `recipe` decide where tensors lie and what is
issued in which order; `device` says what is asked of a device; `executor` issues steps. Nothing here imports
a backend.
"""
