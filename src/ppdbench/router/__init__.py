"""The thin OpenAI-compatible router."""
