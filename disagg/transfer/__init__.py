"""Jobs of copies, carried out over one backend."""
