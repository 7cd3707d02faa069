"""Event kernel, cost models, KV cache, node, cluster."""
