"""Conversations with a prefill and a decode server, whose every answer is compared with that of one undivided server."""
