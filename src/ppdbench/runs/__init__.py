"""What happened, on disk: manifest, points, per-turn records, validity codes, resume, importers."""
