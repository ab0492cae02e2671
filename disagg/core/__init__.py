"""The values that all other packages share: memory, rows, copies, leases, errors. Imports no other package of `disagg`."""
