"""How much do the other requests of a node suffer? Interference, attribution, hand-off, fit."""
