"""The search for the fastest plan: many partitions timed at once, and the ways to propose them."""
