"""Chaos test: real engines, real processes, and faults of processes, links and users under load.

Two prefill and two decode instances differ in tensor-parallel size, page size and axis order. Each rank is a process with
a tiny pool whose pages are reused at once. A few requests are always in progress; at random, requests are aborted, time
out, or go from decode to prefill, and transfers are posted late. Every round is of one kind (`harness.chaos.rounds`):

| kind | what happens | hosts |
|---|---|---|
| `kill` | a rank is killed and restarted at once, at the same address or another, sometimes with a stopped peer | 1 |
| `give-up` | the same, but it is restarted after its peers have given it up | 1 |
| `stop` | a rank is stopped for 1 to 20 s | 1, 2 |
| `cut` | the link between two hosts goes down, or loses all packets, for 1 to 29 s | 2 |
| `lose` | RDMA packets are lost for 1 to 10 s | 1 |
| `down` | an RDMA device is down for 1 to 10 s, then its ranks restart | 1 |
| `users` | a rank restarts as another user; then a peer is stopped until it is given up | 1 |
| `hidepid-1`, `hidepid-2` | the same, with other users' processes hidden in its `/proc` (`mount -o hidepid=1`, `2`) | 1 |
| `compete` | two instances reserve the same request, and a rank reserves it twice | 1, 2 |
| `descriptors` | a rank has no free descriptors for some seconds | 1 |
| `many-peers` | a rank has 1,500 configured peers, of which two exist | 1 |

A run is good if no byte is wrong, every request ends, and all ranks reconnect and stay connected; and if in the end no row
is missing, no thread is dead and no rank has crashed::

    python -m harness.chaos --engine nixl --kinds kill,give-up --rounds 20 --seed 1 --json chaos.json

With `--fencing off` the engines report transfers as finished that are not: the same test must then find wrong bytes.
"""
