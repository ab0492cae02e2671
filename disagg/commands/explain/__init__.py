"""`disagg explain`: who sends what to whom, before a byte moves."""
