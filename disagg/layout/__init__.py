"""What bytes move: ownership of axes, election of writers, plans, and their binding to rows. Pure."""
