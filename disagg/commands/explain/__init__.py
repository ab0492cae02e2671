"""`disagg explain`: the transfers of one request, before a byte moves."""
