"""Figures. matplotlib only here: data in, Figure out."""
