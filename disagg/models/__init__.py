"""Models as the state they leave behind."""
