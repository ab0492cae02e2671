"""RDMA without a NIC: a virtual machine with soft devices, which runs this project's own environment.

A QEMU guest without hardware acceleration boots a stock Debian kernel, whose `rdma_rxe` makes RDMA devices of network
devices. It sees the host's files, read-only below an overlay in memory: the same Python, engines and sources. All programs
come from Debian's packages and are unpacked into a cache; nothing is installed. What it writes to `out/` is kept.

    python -m harness.rdma                        # the tests of tests/rdma
    python -m harness.rdma -- bash -c 'rdma link' # any command

`initrd` builds the first file system, `tsc` measures the rate of the guest's clock, `guest` fetches packages, boots and runs.
`init.sh` is the guest's first process, and `devices.sh` makes its RDMA devices. `link` makes those that can be cut.
Soft devices prove function. They say nothing about speed.
"""
