"""typer and rich only here; the only place that prints."""
