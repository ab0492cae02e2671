"""Joins layout, protocol and transfer: the threads of one manager."""
