"""Chaos test: real engines, real processes, and ranks that are killed under load.

Two prefill and two decode instances differ in tensor-parallel size, page size and axis order. Each rank is a process with
a tiny pool whose pages are reused at once. A few requests are always in progress; at random, requests are aborted, time
out, or go from decode to prefill. Every round kills a random rank (SIGKILL) and restarts it, at the same address or another.
Sometimes a peer is stopped meanwhile (SIGSTOP), so that bytes remain in its sockets.

A run is good if no byte is wrong, every request ends, and all ranks reconnect; and if in the end no row is missing, no
thread is dead and no rank has crashed::

    python -m harness.chaos --engine nixl --rounds 200 --seed 1 --json chaos.json

With `--fencing off` the engines report transfers as finished that are not: the same test must then find wrong bytes.
"""
