"""How bytes move: addresses and lengths only."""
