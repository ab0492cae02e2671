"""What this host is: its devices, its processes, and findings about it."""
