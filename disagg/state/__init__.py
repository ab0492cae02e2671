"""State kinds: each declares the layouts of its tensors."""
