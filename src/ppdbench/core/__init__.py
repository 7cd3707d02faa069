"""Nouns and rules that everything shares. Imports only numpy and scipy."""
