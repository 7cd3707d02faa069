"""What is sent and when: synthetic grid, ShareGPT, WildChat, arrivals."""
