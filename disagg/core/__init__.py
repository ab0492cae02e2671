"""The nouns that everything else is made of: memory, rows, copies, leases, errors. Imports no other room."""
