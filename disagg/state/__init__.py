"""State kinds: each says which layouts its tensors have and which rows a request owns, and nothing else."""
