"""Parts that all families share."""
