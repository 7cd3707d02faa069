"""The decision table: schema, score, build, look-up, diff, exports."""
