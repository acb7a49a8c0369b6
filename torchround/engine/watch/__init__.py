"""Everything that watches an engine."""
