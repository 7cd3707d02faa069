"""The contract of a cluster and its real implementations."""
