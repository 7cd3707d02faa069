"""The thin HTTP/1.1 and SSE layer over httptools that the load client and the router share."""
