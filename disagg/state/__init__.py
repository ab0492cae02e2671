"""State kinds: each declares the layouts of its tensors. Also the allocation of rows."""
